"""Shows a run to people: a live view on a terminal, otherwise one log line per step.

The live view stands below the log lines. A thread of its own draws it from the RunStatus four times a
second. It fits into 80 columns; a wider terminal shows longer curves.
"""

import logging
import os
import sys
from collections.abc import Iterable
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live

from servicekit.drawing import format_duration
from trainer.progress.panel import StatusPanel
from trainer.progress.run_status import UNKNOWN, RunStatus, StepReport
from trainer.progress.time_split import format_range, time_split

log = logging.getLogger("trainer")

REFRESHES = 4
"""Per second."""
WAITING_EVERY_S = 30.0
RECOVERY_EVERY_S = 10.0
"""Seconds between two log lines about the same wait or recovery."""


def is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class TrainingView(Protocol):
    """Called after the RunStatus has changed, without its lock."""

    def show_step(self, report: StepReport) -> None: ...

    def show_waiting(self) -> None: ...

    def show_recovery(self) -> None: ...

    def close(self) -> None: ...


class LogView:
    """One log line per step, and one at intervals during a long wait or recovery."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status
        self._logged_at = status.clock()

    def show_step(self, report: StepReport) -> None:
        self._logged_at = self._status.clock()
        with self._status.lock:
            values = "; ".join(step_values(self._status, report))
        ids = {
            "version": report.version,
            "incarnation": report.incarnation,
            "sequence": report.sequence,
        }
        log.info("version %d: %s", report.version, values, extra=ids)

    def show_waiting(self) -> None:
        status = self._status
        if self._is_time(WAITING_EVERY_S):
            lag = "" if status.lag is None else f", lag {status.lag:,}"
            if status.range is not None:
                lag = f", {format_range(status.range)}"
            log.info(
                "waiting for groups, %s so far: %d of %d are ready%s",
                format_duration(status.phase_seconds), status.ready, status.target, lag,
            )  # fmt: skip

    def show_recovery(self) -> None:
        status = self._status
        if status.recovered == status.to_recover or self._is_time(RECOVERY_EVERY_S):
            log.info(
                "recovery: trained %d of %d Decisions again", status.recovered, status.to_recover
            )

    def close(self) -> None:
        pass

    def _is_time(self, interval: float) -> bool:
        now = self._status.clock()
        if now - max(self._logged_at, self._status.changed) < interval:
            return False
        self._logged_at = now
        return True


class TerminalView:
    """The live view on stderr; log lines appear above it."""

    def __init__(self, status: RunStatus, console: Console | None = None) -> None:
        self._screen = StatusPanel(status)
        self._live = Live(
            console=console or Console(stderr=True),
            get_renderable=lambda: self._screen,
            refresh_per_second=REFRESHES,
        )
        self._handlers = _handlers_of(sys.stderr)
        self._stderr = sys.stderr
        self._live.start()
        for handler in self._handlers:
            handler.setStream(sys.stderr)  # the view has replaced it

    def show_step(self, report: StepReport) -> None: ...

    def show_waiting(self) -> None: ...

    def show_recovery(self) -> None: ...

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


def step_values(status: RunStatus, report: StepReport) -> Iterable[str]:
    """The values of a step for its log line; unknown ones are left out."""
    metrics = report.metrics
    if "reward_mean" in metrics:
        all_groups = metrics.get("reward_mean_all")
        tail = "" if all_groups is None else f" (all groups {all_groups:.3f})"
        yield f"reward {metrics['reward_mean']:.3f}{tail}"
    if "loss" in metrics:
        yield f"loss {metrics['loss']:.4g}"
    if "grad_norm" in metrics:
        yield f"grad norm {metrics['grad_norm']:.3g}"
    if metrics.get("age_mean", UNKNOWN) > UNKNOWN:
        oldest = metrics.get("age_max", metrics["age_mean"])
        yield f"age {metrics['age_mean']:.1f} (max {oldest:.0f})"
    if status.range is not None:
        yield format_range(status.range)
    elif status.lag is not None:
        yield f"lag {status.lag:,}"
    if "tokens_per_second" in metrics:
        yield f"{metrics['tokens_per_second']:,.0f} tokens/s"
    yield ", ".join(
        f"{activity.name} {share:.0%}" for activity, share in time_split(status.split()).items()
    )
