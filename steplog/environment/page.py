"""Groups as one HTML page that needs nothing else: no script, no other file, no network.

What models wrote is text and stays text: all of it is escaped, and the page's policy lets nothing load
or run even if something were not.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --line: light-dark(#d8dee6, #3a414b);
  --soft: light-dark(#f5f7f9, #1d2127); --dim: light-dark(#667080, #98a2b0);
  --good: light-dark(#1a7f4b, #4cc38a); --bad: light-dark(#b3261e, #ff8a80); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; margin: 0; }
.dim { color: var(--dim); }
.good { color: var(--good); } .bad { color: var(--bad); }
details { border: 1px solid var(--line); border-radius: 8px; margin: .6rem 0; padding: .5rem .8rem; }
details details { background: var(--soft); }
summary { cursor: pointer; display: flex; gap: 1rem; align-items: baseline; flex-wrap: wrap; }
summary .item { flex: 1 1 20rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.number { font-variant-numeric: tabular-nums; }
.turn { border-left: 3px solid var(--line); margin: .7rem 0; padding: .1rem .8rem; }
.turn.assistant { border-color: #4a7dff; } .turn.tool { border-color: #b26bd8; }
.turn.system { border-color: #9aa4b2; } .turn.user { border-color: #2aa198; }
.role { font-size: .75rem; text-transform: uppercase; letter-spacing: .06em; color: var(--dim); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0; font: inherit; }
pre.code { font: .85rem/1.45 ui-monospace, monospace; }
hr { border: 0; border-top: 1px dashed var(--line); }
"""


def write_page(file: Path, title: str, groups: Iterable[Json]) -> None:
    """Replaces the file as a whole: a reader never sees half a page."""
    beside = file.with_name(f".{file.name}.new")
    beside.write_text(page(title, list(groups)), encoding="utf-8")
    beside.replace(file)


def page(title: str, groups: Sequence[Json]) -> str:
    """`groups` are as `Group.line` gives them."""
    count = sum(len(group["rollouts"]) for group in groups)
    shown = "".join(map(_group, groups)) or "<p class=dim>No group has ended yet.</p>"
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{_text(title)}</h1>"
        f"<p class=dim>{len(groups)} groups, {count} rollouts; the newest first</p>"
        f"{shown}</body></html>"
    )


def _group(group: Json) -> str:
    rollouts = group["rollouts"]
    usable = [r["reward"] for r in rollouts if r["reward"] is not None]
    mean = f"reward {sum(usable) / len(usable):.3f}" if usable else "no reward"
    failed = sum(rollout["status"] not in ("completed", "truncated") for rollout in rollouts)
    words = [f'<span class="number">{mean}</span>']
    words += [f'<span class="bad">{failed} failed</span>'] if failed else []
    return (
        f"<details><summary><b>{_text(group['number'])}</b>"
        f"<span class=item>{_text(_plain(group['item']))}</span>{''.join(words)}</summary>"
        f"<p class=dim>{_text(group['prompt_uid'])}</p>"
        f"<pre>{_text(_plain(group['item']))}</pre>{''.join(map(_rollout, rollouts))}</details>"
    )


def _rollout(rollout: Json) -> str:
    facts = [_fact("advantage", rollout["advantage"], signed=True)]
    facts += [_fact(name, value) for name, value in rollout["metrics"].items()]
    several = rollout["rewards"] if len(rollout["rewards"]) > 1 else {}
    facts += [_fact(f"reward of {name}", value) for name, value in several.items()]
    facts += [f"{rollout['tokens']} tokens", f"{rollout['seconds']:.1f} s"]
    shown = "<hr>".join("".join(map(_turn, turns)) for turns in rollout["conversations"])
    why = f"<p class=bad>{_text(rollout['reason'])}</p>" if rollout["reason"] else ""
    return (
        f"<details><summary>{_reward(rollout)}<span>{_text(rollout['status'])}</span>"
        f'<span class="dim number">{" · ".join(fact for fact in facts if fact)}</span></summary>'
        f"{why}{shown}</details>"
    )


def _reward(rollout: Json) -> str:
    reward = rollout["reward"]
    if reward is None:
        return "<b class=dim>–</b>"
    colour = "good" if reward > 0 else "bad" if reward < 0 else "dim"
    return f'<b class="{colour} number">{reward:.3f}</b>'


def _fact(name: str, value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return ""
    return f"{_text(name)} {value:+.2f}" if signed else f"{_text(name)} {value:.3g}"


def _turn(message: Json) -> str:
    role = str(message.get("role", ""))
    kind = role if role in ("system", "user", "assistant", "tool") else "user"
    thought = message.get("reasoning") or message.get("reasoning_content")
    parts = [f'<pre class="dim">{_text(thought)}</pre>'] if thought else []
    content = message.get("content")
    if content:
        parts.append(f"<pre>{_text(_plain(content))}</pre>")
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        told = f"{function.get('name')}({function.get('arguments')})"
        parts.append(f'<pre class="code">{_text(told)}</pre>')
    return f'<div class="turn {kind}"><div class=role>{_text(role)}</div>{"".join(parts)}</div>'


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _text(value: Any) -> str:
    return escape(str(value))
