"""Takes reports from the training loop and passes them on to Prometheus, the terminal and trackers.

Reporting never stops training: a tracker that fails is logged once and then ignored. Nothing is logged
while the lock of the RunStatus is held: a log line waits for the view, and the view for that lock.

    with open_reporter("math", trackers=("wandb",), folder=folder) as progress:
        progress.set_start(incarnation=3, version=17)
        with progress.phase("waiting"):
            progress.set_waiting(ready=3, target=8, lag=120)
        with progress.phase("training"):
            …
        progress.report_step(StepReport(…, timings=progress.timings()))
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servicekit.trackers import Trackers
from trainer import metrics
from trainer.progress.run_status import Phase, RunStatus, StepReport, alarm_name
from trainer.progress.trackers import open_trackers
from trainer.progress.view import LogView, TerminalView, TrainingView, is_terminal

log = logging.getLogger(__name__)

TIMED = {"training": metrics.step_seconds, "syncing": metrics.broadcast_seconds}
"""Phases whose duration has a histogram of its own."""


@contextmanager
def open_reporter(
    run: str,
    *,
    trackers: Sequence[str] = (),
    folder: Path = Path("progress"),
    config: Mapping[str, Any] | None = None,
    live: bool | None = None,
) -> Iterator["ProgressReporter"]:
    """`config` is stored by the trackers. `live` chooses between the terminal view and log lines; the
    default is the view if stderr is a terminal. Raises Fatal if the package of a tracker is missing."""
    opened = open_trackers(trackers, run, folder, config or {})
    status = RunStatus(run)
    is_live = is_terminal() if live is None else live
    progress = ProgressReporter(
        status, TerminalView(status) if is_live else LogView(status), opened
    )
    try:
        yield progress
    finally:
        progress.close()


class ProgressReporter:
    """What the training loop calls. Methods may be called from any thread, `phase` from one only."""

    def __init__(self, status: RunStatus, view: TrainingView, trackers: Trackers) -> None:
        self._status = status
        self._view = view
        self._trackers = trackers
        self._verdicts: Counter[str] = Counter()
        self._active: set[str] = set()
        self.last_change = status.clock()
        """When the loop last made progress, on the monotonic clock."""

    def set_start(self, incarnation: int, version: int | None) -> None:
        """Sets the number of this incarnation, and the version that it continues from."""
        with self._status.lock:
            self._status.incarnation, self._status.version = incarnation, version
        metrics.incarnation.set(incarnation)
        if version is not None:
            metrics.policy_version.set(version)
        self._note_progress()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        started = self._status.clock()
        with self._status.lock:
            self._add_seconds(self._status.enter(name))
        self._note_progress()
        try:
            yield
        finally:
            with self._status.lock:
                self._add_seconds(self._status.leave())
            self._note_progress()
        if name in TIMED:  # only phases that succeeded: others would distort the histogram
            TIMED[name].observe(self._status.clock() - started)

    def timings(self) -> dict[str, float]:
        """Seconds by phase since the last step, for its StepReport."""
        with self._status.lock:
            self._add_seconds(self._status.count())
            return self._status.timings()

    def set_waiting(self, ready: int, target: int, lag: int | None) -> None:
        """Called every second or so while the loop waits for groups. It does not count as progress."""
        with self._status.lock:
            self._add_seconds(self._status.count())
            self._status.ready, self._status.target, self._status.lag = ready, target, lag
        self._view.show_waiting()
        metrics.ready_groups.set(ready)
        metrics.wanted_groups.set(target)

    def set_range(self, done: int, total: int) -> None:
        """Sets how many offsets of an offline run's range are read."""
        with self._status.lock:
            self._status.set_range(done, total)

    def set_recovered(self, done: int, total: int) -> None:
        """Sets how many of the Decisions since the checkpoint are trained again."""
        with self._status.lock:
            self._add_seconds(self._status.count())
            self._status.recovered, self._status.to_recover = done, total
        self._view.show_recovery()
        self._note_progress()

    def report_step(self, report: StepReport) -> None:
        with self._status.lock:
            self._add_seconds(self._status.count())
            self._status.add_step(report)
            for sentence in report.alarms:
                self._status.add_alarm(sentence)
        self._raise_alarms(report)
        self._view.show_step(report)
        self._update_metrics(report)
        self._trackers.write(report.version, report.values())
        self._note_progress()

    def raise_alarm(self, sentence: str) -> None:
        """Reports something that a person should look at, as `name: sentence`."""
        with self._status.lock:
            self._status.add_alarm(sentence)
        metrics.alarms.labels(alarm_name(sentence)).inc()
        log.warning("alarm: %s", sentence)

    def set_engines(
        self, version: int, engines_ok: Sequence[str], engines_failed: Sequence[str] = ()
    ) -> None:
        """Sets which engines have confirmed the version, and which have failed."""
        with self._status.lock:
            self._status.engines_ok, self._status.engines_failed = engines_ok, engines_failed
        metrics.engines.labels("ok").set(len(engines_ok))
        metrics.engines.labels("failed").set(len(engines_failed))
        for engine in engines_ok:
            metrics.adopted_version.labels(engine).set(version)
        self._note_progress()

    def close(self) -> None:
        self._view.close()
        self._trackers.close()

    def _raise_alarms(self, report: StepReport) -> None:
        """Counts each alarm; one that persists from step to step is logged only the first time."""
        previous, self._active = self._active, set(map(alarm_name, report.alarms))
        for sentence in report.alarms:
            name = alarm_name(sentence)
            metrics.alarms.labels(name).inc()
            if name not in previous:
                log.warning(
                    "alarm at version %d: %s",
                    report.version,
                    sentence,
                    extra={"version": report.version, "incarnation": report.incarnation},
                )

    def _update_metrics(self, report: StepReport) -> None:
        metrics.incarnation.set(report.incarnation)
        metrics.policy_version.set(report.version)
        metrics.tokens_trained.inc(report.metrics.get("tokens", 0))
        metrics.set_step_values(report.metrics)
        metrics.observe_ages(report.ages)
        for verdict, count in report.verdicts.items():
            metrics.trajectories.labels(verdict).inc(max(0, count - self._verdicts[verdict]))
        self._verdicts = Counter(report.verdicts)

    def _add_seconds(self, phase_seconds: tuple[str, float]) -> None:
        phase, seconds = phase_seconds
        metrics.phase_seconds.labels(phase).inc(seconds)

    def _note_progress(self) -> None:
        self.last_change = self._status.clock()
