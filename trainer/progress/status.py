"""What the loop tells, in one place; from here it goes to Prometheus, the terminal and trackers.

Telling never stops training. A tracker that fails is warned of once and left behind. Nothing is
logged under the Status's lock: a line of the log waits for the view, and the view for that lock.

    with open_progress("math", trackers=("wandb",), folder=folder) as progress:
        progress.began(incarnation=3, version=17)
        with progress.phase("waiting"):
            progress.waiting(ready=3, wanted=8, lag=120)
        with progress.phase("training"):
            …
        progress.stepped(Report(…, timings=progress.timings()))
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servicekit.trackers import Trackers
from trainer import metrics
from trainer.progress.report import Phase, Report, Status, alarm_name
from trainer.progress.trackers import open_trackers
from trainer.progress.view import LogView, TerminalView, View, is_terminal

log = logging.getLogger(__name__)

TIMED = {"training": metrics.step_seconds, "syncing": metrics.broadcast_seconds}
"""Phases whose length is a distribution of its own."""


@contextmanager
def open_progress(
    run: str,
    *,
    trackers: Sequence[str] = (),
    folder: Path = Path("progress"),
    config: Mapping[str, Any] | None = None,
    live: bool | None = None,
) -> Iterator["Progress"]:
    """`config` is what trackers keep of the settings. `live` chooses between the view and log
    lines; by default it is the view where stderr is a terminal. Raises Fatal when a tracker's
    package is missing."""
    opened = open_trackers(trackers, run, folder, config or {})
    status = Status(run)
    is_live = is_terminal() if live is None else live
    progress = Progress(status, TerminalView(status) if is_live else LogView(status), opened)
    try:
        yield progress
    finally:
        progress.close()


class Progress:
    """The loop's side. Methods may be called from any thread, phases from one."""

    def __init__(self, status: Status, view: View, trackers: Trackers) -> None:
        self._status = status
        self._view = view
        self._trackers = trackers
        self._verdicts: Counter[str] = Counter()
        self._active: set[str] = set()
        self.last_change = status.clock()
        """When the loop last did something, on the monotonic clock."""

    def began(self, incarnation: int, version: int | None) -> None:
        """This life's number, and the version that it goes on from."""
        with self._status.lock:
            self._status.incarnation, self._status.version = incarnation, version
        metrics.incarnation.set(incarnation)
        if version is not None:
            metrics.policy_version.set(version)
        self._changed()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        started = self._status.clock()
        with self._status.lock:
            self._count(self._status.enter(name))
        self._changed()
        try:
            yield
        finally:
            with self._status.lock:
                self._count(self._status.leave())
            self._changed()
        if name in TIMED:  # what failed would spoil the distribution
            TIMED[name].observe(self._status.clock() - started)

    def timings(self) -> dict[str, float]:
        """Seconds by phase since the last step, for its Report."""
        with self._status.lock:
            self._count(self._status.count())
            return self._status.timings()

    def waiting(self, ready: int, wanted: int, lag: int | None) -> None:
        """Told every second or so while the loop waits for groups; no sign of life by itself."""
        with self._status.lock:
            self._count(self._status.count())
            self._status.ready, self._status.wanted, self._status.lag = ready, wanted, lag
        self._view.waited()
        metrics.ready_groups.set(ready)
        metrics.wanted_groups.set(wanted)

    def reading(self, done: int, total: int) -> None:
        """So many offsets of a range are read, which ends."""
        with self._status.lock:
            self._status.reached(done, total)

    def recovered(self, done: int, total: int) -> None:
        """So many of the Decisions after the checkpoint are trained again."""
        with self._status.lock:
            self._count(self._status.count())
            self._status.recovered, self._status.to_recover = done, total
        self._view.recovered()
        self._changed()

    def stepped(self, report: Report) -> None:
        with self._status.lock:
            self._count(self._status.count())
            self._status.step(report)
            for sentence in report.alarms:
                self._status.raised(sentence)
        self._raise_alarms(report)
        self._view.stepped(report)
        self._measure(report)
        self._trackers.write(report.version, report.values())
        self._changed()

    def alarm(self, sentence: str) -> None:
        """Something that a person should look at; `name: what and why`."""
        with self._status.lock:
            self._status.raised(sentence)
        metrics.alarms.labels(alarm_name(sentence)).inc()
        log.warning("alarm: %s", sentence)

    def synced(
        self, version: int, engines_ok: Sequence[str], engines_failed: Sequence[str] = ()
    ) -> None:
        """Which engines have confirmed the version, and which have not."""
        with self._status.lock:
            self._status.engines_ok, self._status.engines_failed = engines_ok, engines_failed
        metrics.engines.labels("ok").set(len(engines_ok))
        metrics.engines.labels("failed").set(len(engines_failed))
        for engine in engines_ok:
            metrics.adopted_version.labels(engine).set(version)
        self._changed()

    def close(self) -> None:
        self._view.close()
        self._trackers.close()

    def _raise_alarms(self, report: Report) -> None:
        """One that goes on from step to step is logged when it begins, and counted at each."""
        before, self._active = self._active, set(map(alarm_name, report.alarms))
        for sentence in report.alarms:
            name = alarm_name(sentence)
            metrics.alarms.labels(name).inc()
            if name not in before:
                log.warning(
                    "alarm at version %d: %s",
                    report.version,
                    sentence,
                    extra={"version": report.version, "incarnation": report.incarnation},
                )

    def _measure(self, report: Report) -> None:
        metrics.incarnation.set(report.incarnation)
        metrics.policy_version.set(report.version)
        metrics.tokens_trained.inc(report.metrics.get("tokens", 0))
        metrics.show_step(report.metrics)
        metrics.show_ages(report.ages)
        for verdict, count in report.verdicts.items():
            metrics.trajectories.labels(verdict).inc(max(0, count - self._verdicts[verdict]))
        self._verdicts = Counter(report.verdicts)

    def _count(self, counted: tuple[str, float]) -> None:
        phase, seconds = counted
        metrics.phase_seconds.labels(phase).inc(seconds)

    def _changed(self) -> None:
        self.last_change = self._status.clock()
