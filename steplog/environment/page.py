"""Groups as one HTML page that needs nothing else: no script, no other file, no network.

What models wrote is text and stays text: all of it is escaped, and the page's policy lets nothing load
or run even if something were not. Pictures are those that stand in the messages themselves.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from steplog.environment.turns import data, plain, text, turn

Json = Mapping[str, Any]

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root { color-scheme: light dark; --line: light-dark(#d8dee6, #3a414b);
  --page: light-dark(#fff, #14171b); --soft: light-dark(#f5f7f9, #1b1f25);
  --code: light-dark(#eceff3, #262b33); --dim: light-dark(#5d6776, #98a2b0);
  --good: light-dark(#1a7f4b, #4cc38a); --bad: light-dark(#b3261e, #ff8a80); }
body { font: 15px/1.55 system-ui, sans-serif; background: var(--page); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; margin: 0; }
p { margin: .4rem 0; }
.dim { color: var(--dim); } .good { color: var(--good); } .bad { color: var(--bad); }
.group, .rollout { border: 1px solid var(--line); border-radius: 8px; margin: .6rem 0;
  padding: .5rem .8rem; }
.rollout { background: var(--soft); }
summary { cursor: pointer; }
.group > summary, .rollout > summary { display: flex; gap: .3rem 1rem; align-items: baseline;
  flex-wrap: wrap; }
.group > summary::before, .rollout > summary::before { content: "▸"; color: var(--dim); width: .6rem; }
.group[open] > summary::before, .rollout[open] > summary::before { content: "▾"; }
.item { flex: 1 1 16rem; min-width: 0; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; }
.number { font-variant-numeric: tabular-nums; }
.dots { letter-spacing: .12em; }
.turn { border-left: 3px solid var(--line); margin: .8rem 0; padding: .1rem 0 .1rem .8rem; }
.turn.assistant { border-color: #4a7dff; } .turn.tool { border-color: #b26bd8; }
.turn.system { border-color: #9aa4b2; } .turn.user { border-color: #2aa198; }
.role { font-size: .75rem; text-transform: uppercase; letter-spacing: .06em; color: var(--dim); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; font: inherit; }
pre.code { font: .85rem/1.5 ui-monospace, monospace; background: var(--code); border-radius: 6px;
  padding: .5rem .7rem; }
.call { margin: .4rem 0; }
.call b { font: 600 .85rem ui-monospace, monospace; }
.thought, .thought pre { color: var(--dim); }
.thought > summary, .rest > summary { font: .8rem system-ui, sans-serif; color: var(--dim); }
img { max-width: 100%; max-height: 24rem; border-radius: 6px; }
hr { border: 0; border-top: 1px dashed var(--line); }
@media (max-width: 40rem) { body { margin: 1rem auto; padding: 0 .6rem; }
  .group, .rollout { padding: .4rem .5rem; } .turn { padding-left: .5rem; } }
"""


def write_page(file: Path, title: str, groups: Iterable[Json]) -> None:
    """Replaces the file as a whole: a reader never sees half a page."""
    beside = file.with_name(f".{file.name}.new")
    told = page(title, list(groups))
    beside.write_text(told, encoding="utf-8", errors="backslashreplace")
    beside.replace(file)


def page(title: str, groups: Sequence[Json]) -> str:
    """`groups` are as `Group.line` gives them."""
    count = sum(len(group["rollouts"]) for group in groups)
    shown = "".join(map(_group, groups)) or "<p class=dim>No group has ended yet.</p>"
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{text(title)}</h1>"
        f"<p class=dim>{_many(len(groups), 'group')}, {_many(count, 'rollout')}; the newest first</p>"
        f"{shown}</body></html>"
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _group(group: Json) -> str:
    rollouts = group["rollouts"]
    usable = [r["reward"] for r in rollouts if r["reward"] is not None]
    mean = f"reward {sum(usable) / len(usable):.3f}" if usable else "no reward"
    failed = sum(rollout["status"] not in ("completed", "truncated") for rollout in rollouts)
    dots = "".join(
        f"<span class={_colour(r['reward'])}>{_dot(r['reward'])}</span>" for r in rollouts
    )
    words = [f"<span class=dots>{dots}</span><span class=number>{mean}</span>"]
    words += [f"<span class=bad>{failed} failed</span>"] if failed else []
    return (
        f"<details class=group><summary><b>{text(group['number'])}</b>"
        f"<span class=item>{text(plain(group['item']))}</span>{''.join(words)}</summary>"
        f"<p class=dim>{text(group['prompt_uid'])}</p>"
        f"{data(group['item'])}{''.join(map(_rollout, rollouts))}</details>"
    )


def _rollout(rollout: Json) -> str:
    facts = [_fact("advantage", rollout["advantage"], signed=True)]
    facts += [_fact(name, value) for name, value in rollout["metrics"].items()]
    several = rollout["rewards"] if len(rollout["rewards"]) > 1 else {}
    facts += [_fact(f"reward of {name}", value) for name, value in several.items()]
    facts += [f"{rollout['tokens']} tokens", f"{rollout['seconds']:.1f} s"]
    told = zip(rollout["speakers"], rollout["conversations"], strict=True)
    shown = "<hr>".join(_speaker(name, several) + "".join(map(turn, said)) for name, said in told)
    why = f"<p class=bad>{text(rollout['reason'])}</p>" if rollout["reason"] else ""
    return (
        f"<details class=rollout><summary>{_reward(rollout)}<span>{text(rollout['status'])}</span>"
        f'<span class="dim number">{" · ".join(fact for fact in facts if fact)}</span></summary>'
        f"{why}{shown}</details>"
    )


def _speaker(name: str, several: Json) -> str:
    return f"<p class=dim>{text(name)}</p>" if several else ""


def _reward(rollout: Json) -> str:
    reward = rollout["reward"]
    told = "–" if reward is None else f"{reward:.3f}"
    return f'<b class="{_colour(reward)} number">{told}</b>'


def _dot(reward: float | None) -> str:
    return "○" if reward is None else "●"


def _colour(reward: float | None) -> str:
    if not reward:
        return "dim"
    return "good" if reward > 0 else "bad"


def _fact(name: str, value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return ""
    return f"{text(name)} {value:+.2f}" if signed else f"{text(name)} {value:.3g}"
