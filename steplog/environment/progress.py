"""An environment at work, as a person sees it: a live bar in a terminal, else a line now and then."""

import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from servicekit.drawing import draw_meter, draw_sparkline, format_duration
from steplog.environment.statistics import Statistics

BAR = 28
CURVE = 30
LINE_EVERY_S = 10.0
REFRESHES = 4
"""Per second."""


class Now(NamedTuple):
    """What is going on at this moment."""

    done: int
    target: int | None
    running: int
    limit: int
    waits_for: str
    beside: str = ""
    """What else goes on."""


class View(Protocol):
    def tick(self) -> None:
        """Something has changed."""

    def close(self) -> None: ...


def open_view(title: str, statistics: Statistics, look: Callable[[], Now]) -> View:
    screen = Screen(title, statistics, look)
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return LiveView(screen) if is_terminal else LineView(screen)


class Screen:
    """Drawn anew for each frame."""

    def __init__(self, title: str, statistics: Statistics, look: Callable[[], Now]) -> None:
        self._title = title
        self._statistics = statistics
        self._look = look

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console
        now, told = self._look(), self._statistics
        head = Text.assemble((self._title, "bold"), "  ")
        if now.target is not None:
            head.append_text(draw_meter(now.done / now.target, BAR)).append("  ")
        head.append(
            f"{now.done:,}{_of(now.target)} groups   {format_duration(time.monotonic() - told.began)}"
        )
        yield head
        if told.rewards:
            curve = draw_sparkline(told.rewards[-CURVE:])
            yield Text.assemble(("reward ", "dim"), f"{told.rewards[-1]:.3f}  ", (curve, "green"))
        yield Text.assemble(
            ("running ", "dim"), f"{now.running} of at most {now.limit}   ",
            ("tokens/s ", "dim"), f"{told.tokens_per_second:,.0f}   ",
            ("rollouts ", "dim"), f"{told.rollouts:,}   ",
            ("failed ", "dim"), (f"{told.failed:,}", "red" if told.failed else ""),
        )  # fmt: skip
        waits = Text(f"waits: {now.waits_for}" if now.waits_for else "", "yellow")
        waits.truncate(options.max_width, overflow="ellipsis")
        yield waits
        if now.beside:
            yield Text(now.beside, "dim")

    def line(self) -> str:
        now, told = self._look(), self._statistics
        reward = f", reward {told.rewards[-1]:.3f}" if told.rewards else ""
        waits = f"; waits: {now.waits_for}" if now.waits_for else ""
        beside = f"; {now.beside}" if now.beside else ""
        return (
            f"{self._title}: {now.done:,}{_of(now.target)} groups{reward}, {now.running} running, "
            f"{told.failed:,} of {told.rollouts:,} rollouts failed, "
            f"{told.tokens_per_second:,.0f} tokens/s{waits}{beside}"
        )


def _of(target: int | None) -> str:
    return f" of {target:,}" if target is not None else ""


class LiveView:
    def __init__(self, screen: Screen) -> None:
        console = Console(stderr=True)
        self._live = Live(screen, console=console, refresh_per_second=REFRESHES)
        self._live.start()

    def tick(self) -> None:
        pass

    def close(self) -> None:
        self._live.stop()


class LineView:
    """For logs: a line every ten seconds in which something happened, and a last one."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._told = time.monotonic()

    def tick(self) -> None:
        if time.monotonic() - self._told >= LINE_EVERY_S:
            self.close()

    def close(self) -> None:
        self._told = time.monotonic()
        sys.stderr.write(self._screen.line() + "\n")
        sys.stderr.flush()
