"""The loop of rank 0: decide, train, open, broadcast, go live, save.

The order is what makes a crash harmless. A Decision is committed before its batch is trained, so the
batch is fixed; a version is opened before any engine can hold it, so its marks are right; it is live,
with its Outcomes, when every reachable engine has confirmed it. Whatever is missing after a crash is
done again from the log.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pool.core.ledger import group_id
from pool.core.versions import Version
from pool.readers.decision_batch import find_lost_groups
from schemas import Decision, Outcome
from servicekit import tracing
from servicekit.errors import Fatal, OffsetLost
from servicekit.spans import Span
from trainer.algorithm.alarms import alarms
from trainer.deciding.thread import DecidingThread, RangeEnded
from trainer.life import Life, now_ms
from trainer.machine import machine
from trainer.orders import Orders
from trainer.progress.report import Report
from trainer.progress.status import Progress
from trainer.settings import TrainSettings
from trainer.training import Trained, Training, TrainOrder
from trainer.weights.agreement import Disagreement, compare
from trainer.weights.engine import EngineFailed
from trainer.weights.fleet import Synced, Weights
from trainer.weights.nccl import NoNccl

log = logging.getLogger(__name__)

LOOK_EVERY = 1.0
"""Seconds between two looks at engines and lag while the loop waits."""
PROMPT = range(1, 17)
"""Ids that every vocabulary has, for engines to go on from."""
NAMED = 5
"""Lost groups that a message names."""


class Stopped(Exception):
    """The process was asked to stop while the loop waited."""


class Loop:
    def __init__(
        self,
        settings: TrainSettings,
        life: Life,
        decider: DecidingThread,
        training: Training,
        weights: Weights,
        orders: Orders,
        progress: Progress,
        stop: threading.Event,
        probe: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self._settings = settings
        self._life = life
        self._decider = decider
        self._training = training
        self._weights = weights
        self._orders = orders
        self._progress = progress
        self._stop = stop
        self._probe = probe
        self._saved = training.version
        self._trained: list[tuple[Decision, Trained]] = []
        """Decisions without an Outcome, with what their training gave."""
        self._engines: Sequence[str] = ()

    def run(self) -> None:
        """Until it is asked to stop, the last version that is wanted is live, or no data are left."""
        try:
            with self._progress.phase("recovering"):
                self._recover()
            while self._wants_more():
                with self._span("version", self._training.version + 1):
                    decision = self._await_batch()
                    with self._progress.phase("training"):
                        self._train(decision)
                    self._publish()
                self._report(decision)
                self._save_if_due()
        except (Stopped, RangeEnded):
            pass
        if self._training.version > self._saved:
            self._save()
        self._orders.give("stop")

    def _span(self, name: str, version: int, **about: Any) -> Span:
        life = self._life
        return tracing.span(name, run=life.run, incarnation=life.number, version=version, **about)

    def _wants_more(self) -> bool:
        last = self._settings.versions
        return not self._stop.is_set() and (last is None or self._training.version < last)

    # Recovery

    def _recover(self) -> None:
        """Trains the Decisions that the checkpoint has not seen, and gives engines the result."""
        unseen = self._life.ledger.trained_after(self._training.version)
        self._check_records(unseen)
        for done, decision in enumerate(unseen):
            self._progress.recovered(done, len(unseen))
            if self._stop.is_set():
                raise Stopped
            with self._span("version", self._training.version + 1, again=True):
                self._train(decision)
        self._progress.recovered(len(unseen), len(unseen))
        self._progress.began(self._life.number, self._training.version)
        with self._span("version", self._training.version, again=True):
            self._publish()
        self._check_engines()

    def _check_records(self, decisions: list[Decision]) -> None:
        lost = self._life.ledger.lost_groups()
        groups = [g for d in decisions for g in d.groups if g.verdict == "train"]
        known = [g for g in groups if group_id(g) not in lost]
        gone = asyncio.run(find_lost_groups(self._settings, self._life.topic, known))
        if not gone:
            return
        if not self._settings.accept_loss:
            named = ", ".join(f"{g.prompt_uid} in partition {g.partition}" for g in gone[:NAMED])
            raise OffsetLost(
                f"the log has deleted {len(gone)} decided groups that no checkpoint has seen "
                f"({named}{', …' if len(gone) > NAMED else ''}); "
                "to go on without them, give --accept-loss"
            )
        log.warning("%d decided groups are lost", len(gone))
        self._decider.declare_lost(gone)

    def _check_engines(self) -> None:
        """Labels say which weights an engine was given; this asks whether it computes with them."""
        if not self._settings.check_engines:
            return
        for url in self._engines:
            try:
                found = compare(url, PROMPT, self._logprobs)
                found.demand(self._settings.alarm_mismatch)
                log.info("engine %s agrees with us: log-probs differ by %.2g", url, found.mean)
            except Disagreement as error:
                raise Fatal(str(error)) from error
            except EngineFailed as error:
                self._progress.alarm(f"engine: {error}")

    def _logprobs(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        self._orders.give("logprobs", ids.tobytes())
        return self._training.learner.logprobs(ids)

    # One step

    def _await_batch(self) -> Decision:
        version = self._training.version + 1
        with self._progress.phase("waiting"), self._span("decide", version) as span:
            wanted = self._decider.next_batch(version)
            while not self._settled(wanted):
                if self._stop.is_set():
                    raise Stopped
                self._tend()
            decision = wanted.result()
            span.set_attributes(sequence=decision.sequence)
        _tell_decision(decision)
        return decision

    def _settled(self, wanted: "Future[Decision]") -> bool:
        try:
            wanted.exception(LOOK_EVERY)
        except TimeoutError:
            return False
        return True

    def _tend(self) -> None:
        self._orders.give("tend")
        report = self._weights.tend()
        if report is not None:
            self._tell_engines(report)
        lags = self._decider.ask(self._life.consumer.lags).result()
        self._progress.waiting(
            self._decider.ready(),
            self._settings.groups_per_batch,
            sum(lags.values()) if lags else None,
        )
        self._tell_read()

    def _tell_read(self) -> None:
        read = self._decider.read()
        if read is not None:
            self._progress.reading(*read)

    def _train(self, decision: Decision) -> None:
        lost = self._life.ledger.lost_groups()
        trace = tracing.current().traceparent
        order = TrainOrder(self._life.codec.encode(decision), sorted(lost), trace)
        self._orders.give("train", msgspec.msgpack.encode(order))
        trained = self._training.train(decision, lost)
        if self._life.ledger.outcome(decision.sequence) is None:
            self._trained.append((decision, trained))

    def _outcome(self, decision: Decision, trained: Trained) -> Outcome:
        assert decision.version is not None
        return Outcome(
            run=self._life.run,
            incarnation=self._life.number,
            sequence=decision.sequence,
            version=decision.version,
            metrics=trained.metrics,
            timings=self._progress.timings(),
            created_at=now_ms(),
            batch=trained.batch,
            machine=json.dumps(machine(self._training.learner)),
        )

    def _publish(self) -> None:
        """Opens the present version, gives it to the engines, and says that it is live."""
        version = Version(self._life.number, self._training.version)
        with self._progress.phase("opening"), self._span("open", version.number):
            self._decider.ask(lambda: self._life.open(version.number)).result()
        self._probe("opened")
        with self._progress.phase("syncing"), self._span("sync", version.number):
            while not self._sync(version):
                if self._stop.wait(LOOK_EVERY):
                    raise Stopped
        self._probe("synced")
        outcomes = [self._outcome(*made) for made in self._trained]
        self._trained.clear()
        with self._span("live", version.number):
            self._decider.ask(lambda: self._life.live(version.number, outcomes)).result()
        self._probe("live")

    def _sync(self, version: Version) -> bool:
        """False while no engine can be reached. Without engines there is nothing to do."""
        if not (self._settings.engines or self._settings.engines_file):
            return True
        self._orders.give("sync", str(version).encode())
        try:
            report = self._weights.sync(version)
        except NoNccl as error:
            raise Fatal(str(error)) from error
        self._tell_engines(report)
        return report.counts

    # Telling and saving

    def _tell_engines(self, report: Synced) -> None:
        self._engines = report.engines
        failed = [failure.url for failure in report.failures]
        self._progress.synced(self._training.version, report.engines, failed)

    def _report(self, decision: Decision) -> None:
        outcome = self._life.ledger.outcome(decision.sequence)
        assert outcome is not None and decision.version is not None
        self._tell_read()
        tally, timings = self._decider.tally(), self._progress.timings()
        idle = timings.get("waiting", 0.0) / max(sum(timings.values()), 1e-9)
        metrics = outcome.metrics | tally.metrics() | {"idle_fraction": idle}
        self._progress.stepped(
            Report(
                version=decision.version,
                sequence=decision.sequence,
                incarnation=self._life.number,
                metrics=metrics,
                timings=timings,
                verdicts=dict(self._life.ledger.verdicts),
                alarms=alarms(metrics, self._settings),
                ages=tally.ages,
            )
        )

    def _save_if_due(self) -> None:
        due = self._training.version - self._saved >= self._settings.checkpoint_every
        if due or self._decider.checkpoint_is_due():
            self._save()

    def _save(self) -> None:
        with self._progress.phase("checkpointing"):
            self._orders.give("save")
            self._training.save()
        self._saved = self._training.version
        self._decider.saved(self._saved)


def _tell_decision(decision: Decision) -> None:
    trained = [group for group in decision.groups if group.verdict == "train"]
    ids = {
        "version": decision.version,
        "incarnation": decision.incarnation,
        "sequence": decision.sequence,
    }
    log.info(
        "Decision %d: version %s of %d groups",
        decision.sequence,
        decision.version,
        len(trained),
        extra=ids,
    )
