"""The demo's live view, for a terminal of 80 columns and 24 lines or more; plain lines elsewhere."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from servicekit.drawing import LEVELS, draw_meter, format_duration, format_pairs
from steplog.demo.agent import Line
from steplog.demo.watch import Watch
from steplog.stack.state import Folder, State

WIDEST = 100
CHART_ROWS = 8
DOTS = {"ready": "green", "ended": "green", "starting": "yellow", "failed": "red"}
ROLES = {"user": "cyan", "model": "bold", "tool": "magenta"}
WORDS = {
    "kafka": "the log",
    "model": "a warm start: how a tool call is written",
    "engine": "vLLM on the CPU, the slowest to start",
    "topics": "where Steps, rewards and decisions go",
    "train": "GRPO, from the log",
    "reward": "scores whole conversations",
    "gateway": "the agents' OpenAI URL",
}


class View:
    """Put together anew for each frame."""

    def __init__(self, watch: Watch, folder: Folder, target: int) -> None:
        self._watch = watch
        self._folder = folder
        self._target = target

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        state = self._folder.state
        watch = self._watch
        is_learning = watch.live is not None and bool(watch.rewards)
        body = self._learning(width - 4, state) if is_learning else self._starting(width - 4, state)
        yield Panel(
            Group(*body),
            box=box.ROUNDED,
            title=Text.assemble(("steplog demo", "bold"), "  a small model learns to use a tool"),
            title_align="left",
            subtitle=format_duration(time.monotonic() - watch.began),
            subtitle_align="right",
            border_style="blue",
            width=width,
            padding=(1, 1),
        )

    def _starting(self, width: int, state: State | None) -> Sequence[RenderableType]:
        rows = Table.grid(padding=(0, 2, 0, 0))
        for name, part in state.parts.items() if state is not None else ():
            colour = DOTS.get(part.phase, "dim")
            since = format_duration(time.time() - part.since) if part.phase == "starting" else ""
            told = Text(WORDS.get(name, ""), "dim")
            rows.add_row(
                Text("●", colour), name, Text(part.phase, colour), Text(since, "dim"), told
            )
        said = [self._last_words(state, width)] if state is not None else []
        return [Text("Starting; this takes a minute or two."), Text(), rows, Text(), *said]

    def _last_words(self, state: State, width: int) -> Text:
        """The last line of whoever began first, of those that are not ready and say something."""
        busy = [name for name, part in state.parts.items() if part.phase == "starting"]
        if not busy:
            return Text("The first weights are on their way to the engine.", "dim")
        busy.sort(key=lambda name: state.parts[name].since)
        told = [f"{name}: {line}" for name in busy if (line := last_line(self._folder.log(name)))]
        return Text(told[0][:width] if told else "", "dim")

    def _learning(self, width: int, state: State | None) -> Sequence[RenderableType]:
        watch, curve = self._watch, self._watch.curve
        version = watch.live or 0
        head = Text.assemble((f"version {version}", "bold"), f" of {self._target}  ")
        head.append_text(draw_meter(version / self._target, 30))
        return [
            head,
            Text(),
            *chart(curve, self._target + 1, width - 6),
            Text("     mean reward of all conversations, by the version that led them", "dim"),
            Text(),
            self._numbers(curve),
            self._parts(state),
            Text(),
            *self._example(width),
        ]

    def _numbers(self, curve: Sequence[float]) -> Text:
        watch = self._watch
        newest = watch.outcomes[max(watch.outcomes)].metrics if watch.outcomes else {}
        return format_pairs(
            ("reward", f"{curve[0]:.2f} → {curve[-1]:.2f}" if curve else None, "{}"),
            ("Steps", watch.steps, "{:,}"),
            ("per second", watch.steps_per_second, "{:.0f}"),
            ("groups trained", watch.trained_groups, "{:,}"),
            ("age", newest.get("age_mean"), "{:.1f}"),
        )

    def _parts(self, state: State | None) -> Text:
        words = Text()
        for name, part in state.parts.items() if state is not None else ():
            if part.phase == "ended" and name != "train":
                continue
            words.append("   " if words else "").append("● ", DOTS.get(part.phase, "dim"))
            words.append(name)
            if part.restarts:
                words.append(f" ({part.restarts} restarts)", "red")
        return words

    def _example(self, width: int) -> Sequence[Text]:
        if self._watch.example is None:
            return ()
        lines, reward = self._watch.example
        head = Text.assemble(("an agent just now, reward ", "dim"), f"{reward:.2f}")
        return [head, *(_line(line, width) for line in lines)]


def _line(line: Line, width: int) -> Text:
    words = Text.assemble((f"  {line.role:>5}  ", "dim"), (line.text, ROLES[line.role]))
    words.truncate(width, overflow="ellipsis")
    return words


def chart(curve: Sequence[float], columns: int, width: int) -> list[Text]:
    """Bars from 0 to 1, a column or more for each; the oldest leave when there is no room."""
    each = max(1, min(4, width // max(columns, 1)))
    shown = curve[-(width // each) :]
    rows = []
    for row in reversed(range(CHART_ROWS)):
        label = {CHART_ROWS - 1: "1.0", 0: "0.0", CHART_ROWS // 2: "0.5"}.get(row, "")
        bars = "".join(_cell(value * CHART_ROWS - row) * each for value in shown)
        rows.append(Text.assemble((f"{label:>3} │", "dim"), (bars, "green")))
    return rows


def _cell(height: float) -> str:
    if height <= 0:
        return " "
    return LEVELS[min(len(LEVELS) - 1, int(height * len(LEVELS)))]


def last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2000))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


class Lines:
    """The same for a log file: a line for every part that gets ready, and for every version."""

    def __init__(self, watch: Watch, folder: Folder, say: Callable[[str], None]) -> None:
        self._watch = watch
        self._folder = folder
        self._say = say
        self._ready: dict[str, str] = {}
        self._told = -1

    def look(self) -> None:
        state = self._folder.state
        for name, part in state.parts.items() if state is not None else ():
            if self._ready.get(name, "waiting") != part.phase:
                self._ready[name] = part.phase
                self._say(f"{name}: {part.phase}")
        curve = self._watch.curve
        # The newest version's mean still moves.
        for version in range(self._told + 1, len(curve) - 1):
            self._told = version
            self._say(f"version {version}: reward {curve[version]:.3f}")
