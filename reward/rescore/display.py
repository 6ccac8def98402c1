"""Shows the progress of a rescoring: a bar in a terminal, JSON lines elsewhere."""

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

LINE_INTERVAL_S = 5.0
OUTCOMES = ("scored", "failed", "unscored", "missed")
STOPPED = "Stopped before the end of the range; run the same command again to continue."


@dataclass
class RescoreSummary:
    """What a finished rescoring reports. The tally counts this process's trajectories only."""

    topic: str
    tag: str
    trajectories: int
    tally: Mapping[str, int] = field(default_factory=Counter)

    @property
    def next_commands(self) -> list[str]:
        return [
            f"steplog replay diff --with {self.tag}",
            f"steplog train --rewards {self.tag}",
        ]


class RescoreDisplay(ABC):
    """`done` and `total` are numbers of offsets: their total is known beforehand, and they cover the
    work of all processes."""

    @abstractmethod
    def show_reading(self, done: int, total: int, trajectories: int) -> None: ...
    @abstractmethod
    def show_scoring(self, done: int, total: int, tally: Mapping[str, int]) -> None: ...
    @abstractmethod
    def show_summary(self, summary: RescoreSummary) -> None: ...
    @abstractmethod
    def show_stopped(self) -> None: ...


class BarDisplay(RescoreDisplay):
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("reading", total=None, counts="")

    def show_reading(self, done: int, total: int, trajectories: int) -> None:
        self._update("reading", done, total, f"{trajectories:,} trajectories")

    def show_scoring(self, done: int, total: int, tally: Mapping[str, int]) -> None:
        counts = "  ".join(f"{name} {tally[name]:,}" for name in OUTCOMES if tally[name])
        self._update("scoring", done, total, counts)

    def _update(self, phase: str, done: int, total: int, counts: str) -> None:
        self._progress.update(
            self._task, description=phase, completed=done, total=total, counts=counts
        )

    def show_summary(self, summary: RescoreSummary) -> None:
        self._progress.remove_task(self._task)
        say = self._progress.console.print
        say(f"{summary.topic} has the rewards of all {summary.trajectories:,} trajectories.")
        if summary.tally:
            counts = ", ".join(f"{summary.tally[name]:,} {name}" for name in OUTCOMES)
            say(f"By this process: {counts}.")
        say("To see what has changed, and then to train:")
        for command in summary.next_commands:
            say(f"  {command}")

    def show_stopped(self) -> None:
        self._progress.console.print(STOPPED)


class JsonLinesDisplay(RescoreDisplay):
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._next_line = 0.0
        self._start: tuple[float, int] | None = None
        """Time and offset at which this process began to score."""

    def show_reading(self, done: int, total: int, trajectories: int) -> None:
        self._print_now_and_then(
            {"phase": "looking", "done": done, "total": total, "trajectories": trajectories}
        )

    def show_scoring(self, done: int, total: int, tally: Mapping[str, int]) -> None:
        counts = {name: tally[name] for name in OUTCOMES}
        eta = {"eta_s": self._eta_s(done, total)}
        self._print_now_and_then(
            {"phase": "scoring", "done": done, "total": total, **counts, **eta}
        )

    def _eta_s(self, done: int, total: int) -> float | None:
        """Seconds to the end at the pace of this process so far."""
        now = time.monotonic()
        start, first = self._start = self._start or (now, done)
        pace = (done - first) / (now - start) if now > start else 0.0
        return round((total - done) / pace, 1) if pace > 0 else None

    def show_summary(self, summary: RescoreSummary) -> None:
        counts = {name: summary.tally[name] for name in OUTCOMES}
        self._print(
            {
                "phase": "done",
                "topic": summary.topic,
                "trajectories": summary.trajectories,
                **counts,
                "next": summary.next_commands,
            }
        )

    def show_stopped(self) -> None:
        self._print({"phase": "stopped", "message": STOPPED})

    def _print_now_and_then(self, line: Mapping[str, Any]) -> None:
        if (now := time.monotonic()) >= self._next_line:
            self._next_line = now + LINE_INTERVAL_S
            self._print(line)

    def _print(self, line: Mapping[str, Any]) -> None:
        self._say(msgspec.json.encode(line).decode())


@contextmanager
def open_display(say: Callable[[str], None]) -> Iterator[RescoreDisplay]:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        logging.basicConfig(level=logging.WARNING)
        yield JsonLinesDisplay(say)
        return
    logging.basicConfig(
        level=logging.WARNING, handlers=[RichHandler(console=console, show_path=False)]
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[counts]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield BarDisplay(progress)
