"""Progress of a running environment: a live view in a terminal, otherwise a line every ten seconds."""

import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from servicekit.drawing import draw_meter, draw_sparkline, format_duration
from steplog.environment.records.statistics import Statistics

METER_WIDTH = 28
CURVE_LENGTH = 30
LINE_EVERY_S = 10.0
REFRESHES_PER_SECOND = 4


class WorkSnapshot(NamedTuple):
    """The state of the work at one moment."""

    done: int
    target: int | None
    running: int
    limit: int
    wait_reason: str
    note: str = ""
    """Other work that goes on, such as an evaluation."""


class ProgressView(Protocol):
    def refresh(self) -> None:
        """Something has changed."""

    def close(self) -> None: ...


def open_view(
    title: str, statistics: Statistics, snapshot: Callable[[], WorkSnapshot]
) -> ProgressView:
    text = ProgressText(title, statistics, snapshot)
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return LiveView(text) if is_terminal else LineView(text)


class ProgressText:
    """The progress as text, computed anew for each frame."""

    def __init__(
        self, title: str, statistics: Statistics, snapshot: Callable[[], WorkSnapshot]
    ) -> None:
        self._title = title
        self._statistics = statistics
        self._snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console
        now, totals = self._snapshot(), self._statistics
        head = Text.assemble((self._title, "bold"), "  ")
        if now.target is not None:
            head.append_text(draw_meter(now.done / now.target, METER_WIDTH)).append("  ")
        duration = format_duration(time.monotonic() - totals.began)
        head.append(f"{now.done:,}{_of(now.target)} groups   {duration}")
        yield head
        if totals.mean_reward is not None:
            curve = draw_sparkline(totals.rewards[-CURVE_LENGTH:])
            mean = f"{totals.mean_reward:.3f}  "
            yield Text.assemble(("mean reward ", "dim"), mean, (curve, "green"))
        yield Text.assemble(
            ("running ", "dim"), f"{now.running} of at most {now.limit}   ",
            ("tokens/s ", "dim"), f"{totals.tokens_per_second:,.0f}   ",
            ("rollouts ", "dim"), f"{totals.rollouts:,}   ",
            ("failed ", "dim"), (f"{totals.failed:,}", "red" if totals.failed else ""),
        )  # fmt: skip
        waiting = Text(f"waiting: {now.wait_reason}" if now.wait_reason else "", "yellow")
        waiting.truncate(options.max_width, overflow="ellipsis")
        yield waiting
        if now.note:
            yield Text(now.note, "dim")

    def line(self) -> str:
        now, totals = self._snapshot(), self._statistics
        mean = totals.mean_reward
        reward = f", mean reward {mean:.3f}" if mean is not None else ""
        waiting = f"; waiting: {now.wait_reason}" if now.wait_reason else ""
        note = f"; {now.note}" if now.note else ""
        return (
            f"{self._title}: {now.done:,}{_of(now.target)} groups{reward}, {now.running} running, "
            f"{totals.failed:,} of {totals.rollouts:,} rollouts failed, "
            f"{totals.tokens_per_second:,.0f} tokens/s{waiting}{note}"
        )


def _of(target: int | None) -> str:
    return f" of {target:,}" if target is not None else ""


class LiveView:
    """For terminals; it redraws itself several times a second."""

    def __init__(self, text: ProgressText) -> None:
        console = Console(stderr=True)
        self._live = Live(text, console=console, refresh_per_second=REFRESHES_PER_SECOND)
        self._live.start()

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        self._live.stop()


class LineView:
    """For logs: a line at most every ten seconds, and a last one at the end."""

    def __init__(self, text: ProgressText) -> None:
        self._text = text
        self._printed_at = time.monotonic()

    def refresh(self) -> None:
        if time.monotonic() - self._printed_at >= LINE_EVERY_S:
            self._print()

    def close(self) -> None:
        self._print()

    def _print(self) -> None:
        self._printed_at = time.monotonic()
        sys.stderr.write(self._text.line() + "\n")
        sys.stderr.flush()
