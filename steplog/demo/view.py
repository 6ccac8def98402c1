"""The demo's live view, for terminals of at least 80 x 24 characters; plain lines elsewhere."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from servicekit.drawing import LEVELS, draw_meter, format_duration, format_pairs
from steplog.demo.agent import ChatLine
from steplog.demo.log_watch import LogWatch
from steplog.stack.state import StackFolder, StackState

MAX_WIDTH = 100
CHART_ROWS = 8
DOTS = {"ready": "green", "ended": "green", "starting": "yellow", "failed": "red"}
ROLES = {"user": "cyan", "model": "bold", "tool": "magenta"}
DESCRIPTIONS = {
    "kafka": "the broker that holds the log",
    "model": "warm start: teaches the model how to write a tool call",
    "engine": "vLLM on the CPU, the slowest part to start",
    "topics": "creates the topics for Steps, rewards and decisions",
    "train": "GRPO training from the log",
    "reward": "scores finished conversations",
    "gateway": "serves the agents' OpenAI URL",
}


class DemoView:
    """The live view, computed anew for each frame."""

    def __init__(self, watch: LogWatch, folder: StackFolder, target: int) -> None:
        self._watch = watch
        self._folder = folder
        self._target = target

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, MAX_WIDTH)
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

    def _starting(self, width: int, state: StackState | None) -> Sequence[RenderableType]:
        rows = Table.grid(padding=(0, 2, 0, 0))
        for name, part in state.parts.items() if state is not None else ():
            color = DOTS.get(part.phase, "dim")
            since = format_duration(time.time() - part.since) if part.phase == "starting" else ""
            description = Text(DESCRIPTIONS.get(name, ""), "dim")
            rows.add_row(
                Text("●", color), name, Text(part.phase, color), Text(since, "dim"), description
            )
        last_line = [self._last_log_line(state, width)] if state is not None else []
        return [Text("Starting. This takes a minute or two."), Text(), rows, Text(), *last_line]

    def _last_log_line(self, state: StackState, width: int) -> Text:
        """The last log line of the part that has been starting for the longest time."""
        busy = [name for name, part in state.parts.items() if part.phase == "starting"]
        if not busy:
            return Text("The trainer is sending the first weights to the engine.", "dim")
        busy.sort(key=lambda name: state.parts[name].since)
        lines = [
            f"{name}: {line}" for name in busy if (line := read_last_line(self._folder.log(name)))
        ]
        return Text(lines[0][:width] if lines else "", "dim")

    def _learning(self, width: int, state: StackState | None) -> Sequence[RenderableType]:
        watch, curve = self._watch, self._watch.curve
        version = watch.live or 0
        head = Text.assemble((f"version {version}", "bold"), f" of {self._target}  ")
        head.append_text(draw_meter(version / self._target, 30))
        return [
            head,
            Text(),
            *chart(curve, self._target + 1, width - 6),
            Text("     mean reward of all conversations, by weight version", "dim"),
            Text(),
            self._format_figures(curve),
            self._format_parts(state),
            Text(),
            *self._format_example(width),
        ]

    def _format_figures(self, curve: Sequence[float]) -> Text:
        watch = self._watch
        newest = watch.outcomes[max(watch.outcomes)].metrics if watch.outcomes else {}
        return format_pairs(
            ("reward", f"{curve[0]:.2f} → {curve[-1]:.2f}" if curve else None, "{}"),
            ("Steps", watch.steps, "{:,}"),
            ("per second", watch.steps_per_second, "{:.0f}"),
            ("groups trained", watch.trained_groups, "{:,}"),
            ("age in versions", newest.get("age_mean"), "{:.1f}"),
        )

    def _format_parts(self, state: StackState | None) -> Text:
        words = Text()
        for name, part in state.parts.items() if state is not None else ():
            if part.phase == "ended" and name != "train":
                continue
            words.append("   " if words else "").append("● ", DOTS.get(part.phase, "dim"))
            words.append(name)
            if part.restarts:
                words.append(f" ({part.restarts} restarts)", "red")
        return words

    def _format_example(self, width: int) -> Sequence[Text]:
        if self._watch.example is None:
            return ()
        lines, reward = self._watch.example
        head = Text.assemble(("latest conversation, reward ", "dim"), f"{reward:.2f}")
        return [head, *(_format_line(line, width) for line in lines)]


def _format_line(line: ChatLine, width: int) -> Text:
    words = Text.assemble((f"  {line.role:>5}  ", "dim"), (line.text, ROLES[line.role]))
    words.truncate(width, overflow="ellipsis")
    return words


def chart(curve: Sequence[float], columns: int, width: int) -> list[Text]:
    """Bars from 0 to 1, each one or more columns wide. The oldest are dropped if there is no room."""
    bar_width = max(1, min(4, width // max(columns, 1)))
    visible = curve[-(width // bar_width) :]
    rows = []
    for row in reversed(range(CHART_ROWS)):
        label = {CHART_ROWS - 1: "1.0", 0: "0.0", CHART_ROWS // 2: "0.5"}.get(row, "")
        bars = "".join(_cell(value * CHART_ROWS - row) * bar_width for value in visible)
        rows.append(Text.assemble((f"{label:>3} │", "dim"), (bars, "green")))
    return rows


def _cell(height: float) -> str:
    if height <= 0:
        return " "
    return LEVELS[min(len(LEVELS) - 1, int(height * len(LEVELS)))]


def read_last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2000))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


class DemoLines:
    """For log files: a line for every change of a part, and for every version."""

    def __init__(self, watch: LogWatch, folder: StackFolder, say: Callable[[str], None]) -> None:
        self._watch = watch
        self._folder = folder
        self._say = say
        self._phases: dict[str, str] = {}
        self._last_version = -1

    def print_changes(self) -> None:
        state = self._folder.state
        for name, part in state.parts.items() if state is not None else ():
            if self._phases.get(name, "waiting") != part.phase:
                self._phases[name] = part.phase
                self._say(f"{name}: {part.phase}")
        curve = self._watch.curve
        # The mean of the newest version still changes.
        for version in range(self._last_version + 1, len(curve) - 1):
            self._last_version = version
            self._say(f"version {version}: reward {curve[version]:.3f}")
