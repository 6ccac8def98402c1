"""Groups as one self-contained HTML page: no script, no other file, no network.

Everything that models wrote is escaped, and even if something were not, the page's content policy lets
nothing load or run. Only pictures that are part of the messages are shown.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from steplog.environment.records.messages import as_text, escape_text, render_data, render_message

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
    """Replaces the file in one step: a reader never sees half a page."""
    new_file = file.with_name(f".{file.name}.new")
    html = render_page(title, list(groups))
    new_file.write_text(html, encoding="utf-8", errors="backslashreplace")
    new_file.replace(file)


def render_page(title: str, groups: Sequence[Json]) -> str:
    """`groups` are in the form of `Group.as_json`."""
    count = sum(len(group["rollouts"]) for group in groups)
    body = "".join(map(_render_group, groups)) or "<p class=dim>No group has finished yet.</p>"
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{escape_text(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape_text(title)}</h1>"
        f"<p class=dim>{_count(len(groups), 'group')}, {_count(count, 'rollout')}; newest first</p>"
        f"{body}</body></html>"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _render_group(group: Json) -> str:
    rollouts = group["rollouts"]
    rewards = [r["reward"] for r in rollouts if r["reward"] is not None]
    mean = f"reward {sum(rewards) / len(rewards):.3f}" if rewards else "no reward"
    failed = sum(rollout["status"] not in ("completed", "truncated") for rollout in rollouts)
    dots = "".join(
        f"<span class={_color(r['reward'])}>{_dot(r['reward'])}</span>" for r in rollouts
    )
    facts = [f"<span class=dots>{dots}</span><span class=number>{mean}</span>"]
    facts += [f"<span class=bad>{failed} failed</span>"] if failed else []
    return (
        f"<details class=group><summary><b>{escape_text(group['number'])}</b>"
        f"<span class=item>{escape_text(as_text(group['item']))}</span>{''.join(facts)}</summary>"
        f"<p class=dim>{escape_text(group['prompt_uid'])}</p>"
        f"{render_data(group['item'])}{''.join(map(_render_rollout, rollouts))}</details>"
    )


def _render_rollout(rollout: Json) -> str:
    facts = [_fact("advantage", rollout["advantage"], signed=True)]
    facts += [_fact(name, value) for name, value in rollout["metrics"].items()]
    has_several_agents = len(rollout["rewards"]) > 1
    agent_rewards = rollout["rewards"] if has_several_agents else {}
    facts += [_fact(f"reward of {name}", value) for name, value in agent_rewards.items()]
    facts += [f"{rollout['tokens']} tokens", f"{rollout['seconds']:.1f} s"]
    conversations = "<hr>".join(
        (f"<p class=dim>{escape_text(agent)}</p>" if has_several_agents else "")
        + "".join(map(render_message, messages))
        for agent, messages in zip(rollout["speakers"], rollout["conversations"], strict=True)
    )
    reason = f"<p class=bad>{escape_text(rollout['reason'])}</p>" if rollout["reason"] else ""
    return (
        f"<details class=rollout><summary>{_render_reward(rollout)}"
        f"<span>{escape_text(rollout['status'])}</span>"
        f'<span class="dim number">{" · ".join(fact for fact in facts if fact)}</span></summary>'
        f"{reason}{conversations}</details>"
    )


def _render_reward(rollout: Json) -> str:
    reward = rollout["reward"]
    number = "–" if reward is None else f"{reward:.3f}"
    return f'<b class="{_color(reward)} number">{number}</b>'


def _dot(reward: float | None) -> str:
    return "○" if reward is None else "●"


def _color(reward: float | None) -> str:
    if not reward:
        return "dim"
    return "good" if reward > 0 else "bad"


def _fact(name: str, value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return ""
    return f"{escape_text(name)} {value:+.2f}" if signed else f"{escape_text(name)} {value:.3g}"
