"""What people see of a rescoring: a bar in a terminal, lines of JSON elsewhere."""

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

TELL_EVERY = 5.0
"""Seconds between two lines where nobody watches."""
COUNTED = ("scored", "failed", "unscored", "missed")
GO_ON = "stopped before the end; the same command goes on"


@dataclass
class Done:
    """A rescoring at its end. The tally is this process's own."""

    topic: str
    tag: str
    trajectories: int
    tally: Mapping[str, int] = field(default_factory=Counter)

    @property
    def next(self) -> list[str]:
        return [
            f"steplog replay diff --with {self.tag}",
            f"steplog train --rewards {self.tag}",
        ]


class View(ABC):
    """Offsets say how far it is: they are known beforehand, and every worker has them."""

    @abstractmethod
    def looked(self, done: int, total: int, trajectories: int) -> None: ...
    @abstractmethod
    def scored(self, done: int, total: int, tally: Mapping[str, int]) -> None: ...
    @abstractmethod
    def finished(self, done: Done) -> None: ...
    @abstractmethod
    def stopped(self) -> None: ...


class Bar(View):
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("looking", total=None, told="")

    def looked(self, done: int, total: int, trajectories: int) -> None:
        self._show("looking", done, total, f"{trajectories:,} trajectories")

    def scored(self, done: int, total: int, tally: Mapping[str, int]) -> None:
        told = "  ".join(f"{name} {tally[name]:,}" for name in COUNTED if tally[name])
        self._show("scoring", done, total, told)

    def _show(self, what: str, done: int, total: int, told: str) -> None:
        self._progress.update(self._task, description=what, completed=done, total=total, told=told)

    def finished(self, done: Done) -> None:
        self._progress.remove_task(self._task)
        say = self._progress.console.print
        say(f"{done.topic} has the {done.trajectories:,} trajectories of the range")
        if done.tally:
            say(", ".join(f"{done.tally[name]:,} {name}" for name in COUNTED) + " by this process")
        say("see what has changed, then train:")
        for command in done.next:
            say(f"  {command}")

    def stopped(self) -> None:
        self._progress.console.print(GO_ON)


class Lines(View):
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._next = 0.0
        self._began: tuple[float, int] | None = None

    def looked(self, done: int, total: int, trajectories: int) -> None:
        self._now_and_then(
            {"phase": "looking", "done": done, "total": total, "trajectories": trajectories}
        )

    def scored(self, done: int, total: int, tally: Mapping[str, int]) -> None:
        counts = {name: tally[name] for name in COUNTED}
        left = {"eta_s": self._left(done, total)}
        self._now_and_then({"phase": "scoring", "done": done, "total": total, **counts, **left})

    def _left(self, done: int, total: int) -> float | None:
        """Seconds to the end at the pace since this process began."""
        now = time.monotonic()
        began, at = self._began = self._began or (now, done)
        pace = (done - at) / (now - began) if now > began else 0.0
        return round((total - done) / pace, 1) if pace > 0 else None

    def finished(self, done: Done) -> None:
        counts = {name: done.tally[name] for name in COUNTED}
        found = {"topic": done.topic, "trajectories": done.trajectories, **counts}
        self._tell({"phase": "done", **found, "next": done.next})

    def stopped(self) -> None:
        self._tell({"phase": "stopped", "message": GO_ON})

    def _now_and_then(self, told: Mapping[str, Any]) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + TELL_EVERY
            self._tell(told)

    def _tell(self, told: Mapping[str, Any]) -> None:
        self._say(msgspec.json.encode(told).decode())


@contextmanager
def open_view(say: Callable[[str], None]) -> Iterator[View]:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        logging.basicConfig(level=logging.WARNING)
        yield Lines(say)
        return
    logging.basicConfig(
        level=logging.WARNING, handlers=[RichHandler(console=console, show_path=False)]
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[told]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield Bar(progress)
