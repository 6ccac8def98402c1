"""The training loop of rank 0: decide, train, open, broadcast, go live, save.

The order makes a crash harmless. A Decision is committed before its batch is trained, so the batch is
fixed. While it is trained the next one may be decided, but not a third: a restart trains both, one
after the other. A version is opened before any engine can hold it, so its marks are right. It goes
live, together with its Outcomes, when every reachable engine has confirmed it. Whatever a crash
interrupts is done again from the log.
"""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pool.core.ledger import GroupId
from pool.core.versions import Version
from schemas import Decision, Outcome
from servicekit import tracing
from servicekit.errors import Fatal
from servicekit.spans import Span
from trainer.algorithm.alarms import find_alarms
from trainer.decisions.decider import Decider, RangeEnded
from trainer.incarnation.base import Incarnation, now_ms
from trainer.preparation import BatchPreparation
from trainer.progress.idle import idle_metrics
from trainer.progress.reporter import ProgressReporter
from trainer.progress.run_status import StepReport
from trainer.rank_orders import BatchOrder, LogprobsOrder, RankOrders
from trainer.saving import Saving
from trainer.settings import TrainSettings
from trainer.training import DecisionTraining, TrainingResult
from trainer.weights.engine import EngineCallFailed
from trainer.weights.fleet import EngineFleet
from trainer.weights.logprob_check import LogprobMismatch, compare_logprobs
from trainer.weights.nccl import NcclUnavailable
from trainer.weights.sync import SyncReport
from trainer.withdrawal import check_not_deleted, give_up_batch

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
"""Seconds between two checks of engines and lag while the loop waits."""
CHECK_PROMPT = range(1, 17)
"""Token ids that every vocabulary has; engines continue this prompt when they are checked."""


class Stopped(Exception):
    """The process got a signal to stop while the loop waited."""


class TrainingLoop:
    def __init__(
        self,
        settings: TrainSettings,
        incarnation: Incarnation,
        decider: Decider,
        training: DecisionTraining,
        preparation: BatchPreparation,
        fleet: EngineFleet,
        orders: RankOrders,
        progress: ProgressReporter,
        stop: threading.Event,
        probe: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self._settings = settings
        self._incarnation = incarnation
        self._decider = decider
        self._training = training
        self._preparation = preparation
        self._fleet = fleet
        self._orders = orders
        self._progress = progress
        self._stop = stop
        self._probe = probe
        self._saving = Saving(settings.checkpoint_every, training, decider, orders, progress)
        self._requested: tuple[int, Future[Decision]] | None = None
        """The version that the last requested batch makes, and its Decision."""
        self._unpublished: list[tuple[Decision, TrainingResult]] = []
        """Trained Decisions whose Outcome is not written yet."""
        self._engines: Sequence[str] = ()
        """URLs of the engines that confirmed the last version."""

    def run(self) -> None:
        """Runs until a signal, until the last requested version is live, or until the range ends."""
        try:
            with self._progress.phase("recovering"):
                self._recover()
            while self._should_continue(self._training.version):
                with self._span("version", self._training.version + 1):
                    decision = self._await_batch()
                    if self._should_continue(self._training.version + 1):
                        self._request_batch(self._training.version + 2)
                    self._train(decision)
                    self._publish()
                self._report(decision)
                self._saving.save_if_due()
        except (Stopped, RangeEnded):
            pass
        self._saving.finish()
        self._orders.send("stop")

    def _span(self, name: str, version: int, **attributes: Any) -> Span:
        return tracing.span(
            name,
            run=self._incarnation.run,
            incarnation=self._incarnation.number,
            version=version,
            **attributes,
        )

    def _should_continue(self, version: int) -> bool:
        """Whether another version is to be made after this one."""
        last = self._settings.versions
        return not self._stop.is_set() and (last is None or version < last)

    # Recovery

    def _recover(self) -> None:
        """Trains the Decisions made since the checkpoint again, and sends the result to the engines."""
        ledger, restored = self._incarnation.ledger, self._training.version
        if self._settings.give_up is not None:
            give_up_batch(self._settings.give_up, restored, ledger, self._decider)
        unseen = ledger.trained_after(restored)
        check_not_deleted(self._settings, self._incarnation.topic, unseen, ledger, self._decider)
        for done, decision in enumerate(unseen):
            self._progress.set_recovered(done, len(unseen))
            if self._stop.is_set():
                raise Stopped
            for following in unseen[done + 1 : done + 2]:
                self._preparation.start(following, self._withdrawn_groups())
            with self._span("version", self._training.version + 1, again=True):
                self._train(decision)
        self._progress.set_recovered(len(unseen), len(unseen))
        self._progress.set_start(self._incarnation.number, self._training.version)
        with self._span("version", self._training.version, again=True):
            self._publish()
        self._check_engines()

    def _check_engines(self) -> None:
        """Checks that engines compute with the weights that their version label names."""
        if not self._settings.check_engines:
            return
        for url in self._engines:
            try:
                difference = compare_logprobs(url, CHECK_PROMPT, self._logprobs)
                difference.check(self._settings.alarm_mismatch)
                log.info(
                    "engine %s and the trainer agree: log-probs differ by %.2g on average",
                    url, difference.mean,
                )  # fmt: skip
            except LogprobMismatch as error:
                raise Fatal(str(error)) from error
            except EngineCallFailed as error:
                self._progress.raise_alarm(f"engine: {error}")

    def _logprobs(self, ids: NDArray[np.int32], temperature: float) -> NDArray[np.float32]:
        self._orders.send("logprobs", LogprobsOrder(ids.tobytes(), temperature).encode())
        return self._training.learner.logprobs(ids, temperature)

    # One step

    def _await_batch(self) -> Decision:
        version = self._training.version + 1
        with self._progress.phase("waiting"), self._span("decide", version) as span:
            batch = self._request_batch(version)
            while not self._is_decided(batch):
                if self._stop.is_set():
                    raise Stopped
                self._check_while_waiting()
            decision = batch.result()
            span.set_attributes(sequence=decision.sequence)
        _log_decision(decision)
        return decision

    def _request_batch(self, version: int) -> "Future[Decision]":
        """The Decision on the batch that makes `version`, which may have been requested before."""
        if self._requested is None or self._requested[0] != version:
            self._requested = version, self._decider.next_batch(version)
            self._requested[1].add_done_callback(self._prepare)
        return self._requested[1]

    def _prepare(self, batch: "Future[Decision]") -> None:
        """Called in the decider's thread."""
        if batch.exception() is None:
            self._preparation.start(batch.result(), self._incarnation.ledger.withdrawn_groups())

    def _is_decided(self, batch: "Future[Decision]") -> bool:
        try:
            batch.exception(CHECK_EVERY_S)
        except TimeoutError:
            return False
        return True

    def _check_while_waiting(self) -> None:
        self._saving.note_complete()
        self._orders.send("catch_up")
        report = self._fleet.catch_up()
        if report is not None:
            self._note_engines(report)
        lags = self._decider.submit(self._incarnation.consumer.lags).result()
        self._progress.set_waiting(
            self._decider.ready(),
            self._settings.groups_per_batch,
            sum(lags.values()) if lags else None,
        )
        self._note_range_progress()

    def _note_range_progress(self) -> None:
        range_progress = self._decider.range_progress()
        if range_progress is not None:
            self._progress.set_range(*range_progress)

    def _train(self, decision: Decision) -> None:
        withdrawn = self._withdrawn_groups()
        order = BatchOrder.of(
            self._incarnation.codec, decision, withdrawn, tracing.current().traceparent
        )
        self._orders.send("train", order.encode())
        with self._progress.phase("reading"):
            prepared = self._preparation.take(decision, withdrawn)
        with self._progress.phase("training"):
            result = self._training.train(prepared)
        if self._incarnation.ledger.outcome(decision.sequence) is None:
            self._unpublished.append((decision, result))

    def _withdrawn_groups(self) -> set[GroupId]:
        """Read in the decider's thread, which may be writing a Decision."""
        return self._decider.submit(self._incarnation.ledger.withdrawn_groups).result()

    def _outcome(self, decision: Decision, result: TrainingResult) -> Outcome:
        assert decision.version is not None
        return Outcome(
            run=self._incarnation.run,
            incarnation=self._incarnation.number,
            sequence=decision.sequence,
            version=decision.version,
            metrics=result.metrics,
            timings=self._progress.timings(),
            created_at=now_ms(),
            batch=result.batch,
            machine=json.dumps(result.machine),
        )

    def _publish(self) -> None:
        """Opens the present version, sends it to the engines, and commits that it is live."""
        version = Version(self._incarnation.number, self._training.version)
        with self._progress.phase("opening"), self._span("open", version.number):
            self._decider.submit(lambda: self._incarnation.open_version(version.number)).result()
        self._probe("opened")
        with self._progress.phase("syncing"), self._span("sync", version.number):
            while not self._sync(version):
                if self._stop.wait(CHECK_EVERY_S):
                    raise Stopped
        self._probe("synced")
        outcomes = [self._outcome(*trained) for trained in self._unpublished]
        self._unpublished.clear()
        with self._span("live", version.number):
            self._decider.submit(
                lambda: self._incarnation.set_live(version.number, outcomes)
            ).result()
        self._probe("live")

    def _sync(self, version: Version) -> bool:
        """Whether the version counts as sent: False while no engine can be reached, True without
        engines."""
        if not (self._settings.engines or self._settings.engines_file):
            return True
        self._orders.send("sync", str(version).encode())
        try:
            report = self._fleet.sync(version)
        except NcclUnavailable as error:
            raise Fatal(str(error)) from error
        self._note_engines(report)
        return report.is_complete

    # Reporting

    def _note_engines(self, report: SyncReport) -> None:
        self._engines = report.engines
        failed = [failure.url for failure in report.failures]
        self._progress.set_engines(self._training.version, report.engines, failed)

    def _report(self, decision: Decision) -> None:
        outcome = self._incarnation.ledger.outcome(decision.sequence)
        assert outcome is not None and decision.version is not None
        self._note_range_progress()
        statistics = self._decider.take_statistics(decision.sequence)
        timings = self._progress.timings()
        metrics = outcome.metrics | statistics.metrics() | idle_metrics(timings)
        self._progress.report_step(
            StepReport(
                version=decision.version,
                sequence=decision.sequence,
                incarnation=self._incarnation.number,
                metrics=metrics,
                timings=timings,
                verdicts=dict(self._incarnation.ledger.verdicts),
                alarms=find_alarms(metrics, self._settings),
                ages=statistics.ages,
            )
        )


def _log_decision(decision: Decision) -> None:
    trained = [group for group in decision.groups if group.verdict == "train"]
    ids = {
        "version": decision.version,
        "incarnation": decision.incarnation,
        "sequence": decision.sequence,
    }
    log.info(
        "Decision %d: training version %s on %d groups",
        decision.sequence,
        decision.version,
        len(trained),
        extra=ids,
    )
