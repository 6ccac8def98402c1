"""The run as a person sees it: a live view on a terminal, else a line per step.

The view stands below what is logged and is drawn from the Status four times a second, by a thread of
its own. It fits 80 columns; a wider terminal shows longer curves.
"""

import logging
import os
import sys
from collections.abc import Iterable
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live

from servicekit.drawing import format_duration
from trainer.progress.report import UNKNOWN, Report, Status
from trainer.progress.screen import Screen
from trainer.progress.time_split import range_words, time_split

log = logging.getLogger("trainer")

REFRESHES = 4
"""Per second."""
WAITING_TOLD = 30.0
RECOVERY_TOLD = 10.0
"""Seconds between two lines of the log about one wait or one recovery."""


def is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class View(Protocol):
    """Told without the Status's lock, after the Status has changed."""

    def stepped(self, report: Report) -> None: ...

    def waited(self) -> None: ...

    def recovered(self) -> None: ...

    def close(self) -> None: ...


class LogView:
    """One line per step, and one now and then while nothing seems to happen."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._told = status.clock()

    def stepped(self, report: Report) -> None:
        self._told = self._status.clock()
        with self._status.lock:
            words = "; ".join(step_words(self._status, report))
        ids = {
            "version": report.version,
            "incarnation": report.incarnation,
            "sequence": report.sequence,
        }
        log.info("version %d: %s", report.version, words, extra=ids)

    def waited(self) -> None:
        status = self._status
        if self._is_time(WAITING_TOLD):
            lag = "" if status.lag is None else f", lag {status.lag:,}"
            if status.range is not None:
                lag = f", {range_words(status.range)}"
            log.info(
                "waiting for %s: %d of %d groups are ready%s",
                format_duration(status.phase_seconds), status.ready, status.wanted, lag,
            )  # fmt: skip

    def recovered(self) -> None:
        status = self._status
        if status.recovered == status.to_recover or self._is_time(RECOVERY_TOLD):
            log.info("trained again: %d of %d Decisions", status.recovered, status.to_recover)

    def close(self) -> None:
        pass

    def _is_time(self, interval: float) -> bool:
        now = self._status.clock()
        if now - max(self._told, self._status.changed) < interval:
            return False
        self._told = now
        return True


class TerminalView:
    """The live view on stderr. What is logged meanwhile appears above it."""

    def __init__(self, status: Status, console: Console | None = None) -> None:
        self._screen = Screen(status)
        self._live = Live(
            console=console or Console(stderr=True),
            get_renderable=lambda: self._screen,
            refresh_per_second=REFRESHES,
        )
        self._handlers = _handlers_of(sys.stderr)
        self._stderr = sys.stderr
        self._live.start()
        for handler in self._handlers:
            handler.setStream(sys.stderr)  # which is the view's now

    def stepped(self, report: Report) -> None: ...

    def waited(self) -> None: ...

    def recovered(self) -> None: ...

    def close(self) -> None:
        for handler in self._handlers:
            handler.setStream(self._stderr)
        self._live.stop()


def _handlers_of(stream: TextIO) -> "list[logging.StreamHandler[TextIO]]":
    return [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is stream
    ]


def step_words(status: Status, report: Report) -> Iterable[str]:
    """A step for the log, without what is not known."""
    told = report.metrics
    if "reward_mean" in told:
        every = told.get("reward_mean_all")
        yield f"reward {told['reward_mean']:.3f}" + ("" if every is None else f" (all {every:.3f})")
    if "loss" in told:
        yield f"loss {told['loss']:.4g}"
    if "grad_norm" in told:
        yield f"grad norm {told['grad_norm']:.3g}"
    if told.get("age_mean", UNKNOWN) > UNKNOWN:
        oldest = told.get("age_max", told["age_mean"])
        yield f"age {told['age_mean']:.1f} (max {oldest:.0f})"
    if status.range is not None:
        yield range_words(status.range)
    elif status.lag is not None:
        yield f"lag {status.lag:,}"
    if "tokens_per_second" in told:
        yield f"{told['tokens_per_second']:,.0f} tokens/s"
    yield ", ".join(
        f"{activity.name} {share:.0%}" for activity, share in time_split(status.split()).items()
    )
