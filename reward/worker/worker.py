"""The reward worker: reads `steps`, scores complete trajectories, writes `rewarded`.

    consumer.poll ──► scoring processes ──► event loop ──► outputs, in the order of each key
                      (plain functions)    (async ones)         └──► one transaction with the offsets

The thread that calls `run` owns the consumer: it polls, collects scored trajectories and commits.
Scoring happens elsewhere. A worker that is killed has written each output once or not at all;
whatever was being scored is scored again by the worker that gets the partition next.

Trajectories of channels that the worker does not score are left out of its output: workers with
other functions may score them. Feedback is always copied, because its channel may not be that of its
trajectory's End.

A worker with a tag writes to the tag's topic only. Ending overdue trajectories and writing dead
letters is left to workers without a tag, so that it is not repeated for every tag.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping

from pool.connection import Connection
from pool.consumers.consumer import StatefulConsumer
from pool.core.progress import Progress, WorkItem
from pool.core.trajectories import (
    Trajectory,
    TrajectoryAssembler,
)
from pool.readers.dataset import began_too_early
from pool.readers.selection import Selection
from pool.topics import STEPS, TRAJECTORIES
from reward import metrics
from reward.scoring.scorer import Item, Scorer, ScoringJob
from reward.worker.expiry import overdue
from reward.worker.held_failures import HeldFailures
from reward.worker.key_order import KeyOrder
from reward.worker.outputs import RewardOutputs, log_ids
from schemas import Feedback
from servicekit import tracing
from servicekit.metrics import last_progress, set_lag
from servicekit.spans import Span

log = logging.getLogger(__name__)

OVERDUE_INTERVAL_S = 5.0
LAG_INTERVAL_S = 5.0
POLL_TIMEOUT_S = 0.05
NAMED_CHANNELS = 20
"""Channels that are not scored and that the worker's log names."""


class RewardWorker:
    """One member of the consumer group, for the trajectories of some `channels`. `into` is the tag it
    writes for. A rescoring also gives a `selection` of trajectories and the offsets at which each
    partition `ends`."""

    def __init__(
        self,
        connection: Connection,
        group: str,
        slot: str,
        scorer: Scorer,
        at_once: int,
        channels: Collection[str],
        into: str | None = None,
        selection: Selection | None = None,
        ends: Mapping[int, int] | None = None,
    ) -> None:
        self._scorer = scorer
        self._group = group
        self._is_untagged = into is None
        self._selection = selection
        self._channels = frozenset(channels)
        self._other_channels: set[str] = set()
        """Channels that are not scored and that the log has named."""
        self._steps = connection.topic_name(STEPS)
        self._outputs = RewardOutputs(connection, group, into)
        self.tally = self._outputs.tally
        self._order: KeyOrder[ScoringJob] = KeyOrder()
        self._scored: queue.SimpleQueue[ScoringJob] = queue.SimpleQueue()
        self._held = HeldFailures()
        self._in_hand = 0
        self._next_overdue_check = 0.0
        self._next_lag_check = 0.0
        self._expired: dict[str, Progress[Item]] = {}
        """Expired Ends of the last check, with the assignment under which each was written."""
        self.last_progress = time.monotonic()
        self._consumer: StatefulConsumer[Item] = StatefulConsumer(
            connection,
            topic=STEPS,
            group=group,
            transactional_id=f"{group}-{connection.topic_prefix}{slot}",
            assembler=lambda partition: TrajectoryAssembler(),
            codec=connection.codec(),
            max_waiting=at_once,
            ends=ends,
            dead_letters=self._is_untagged,
        )

    def run(self, stop: threading.Event, is_done: Callable[[], bool] = lambda: False) -> None:
        with self._consumer:
            while not stop.is_set() and not is_done():
                self.turn()

    def turn(self) -> None:
        """One round of the loop: read, submit, collect, commit."""
        self._scorer.check()
        for work in self._consumer.poll(POLL_TIMEOUT_S):
            self._submit(work)
        self._collect()
        self._end_overdue()
        if self._consumer.commit():
            self.last_progress = time.monotonic()
            last_progress.set_to_current_time()
        metrics.in_hand.set(self._in_hand)
        self._show_lag()

    def _show_lag(self) -> None:
        if (now := time.monotonic()) < self._next_lag_check:
            return
        self._next_lag_check = now + LAG_INTERVAL_S
        set_lag(self._group, self._steps, self._consumer.lags())

    def _submit(self, work: WorkItem[Item]) -> None:
        if not self._is_in_channels(work.item) or not self._is_selected(work.item):
            self._consumer.finish([work], [])
            return
        job = ScoringJob(work.item, self._scored.put, work, is_wanted=lambda: self._is_ours(work))
        if tracing.is_enabled() and isinstance(work.item, Trajectory):
            job.span = self._start_span(work.item)
        self._order.add(job.key, job)
        self._in_hand += 1
        self._scorer.submit(job)

    def _start_span(self, trajectory: Trajectory) -> Span:
        """A child of the End's trace, which triggers the scoring, with links to the Steps' traces."""
        return tracing.span(
            f"process {self._steps}",
            "consumer",
            trajectory.trace,
            [step.trace for step in trajectory.steps if step.trace],
            system="kafka",
            messaging="process",
            messaging_type="process",
            topic=self._steps,
            group=self._group,
            steps=len(trajectory.steps),
            **log_ids(trajectory.end),
        )

    def _is_in_channels(self, item: Item) -> bool:
        record = item.end if isinstance(item, Trajectory) else item.received.record
        channel = getattr(record, "channel", None)
        if channel is None or channel in self._channels or isinstance(record, Feedback):
            return True
        if channel not in self._other_channels and len(self._other_channels) < NAMED_CHANNELS:
            self._other_channels.add(channel)
            log.info("channel %s is not scored; to score it, list it in --channels", channel)
        return False

    def _is_selected(self, item: Item) -> bool:
        if self._selection is None:
            return True
        if began_too_early(item):
            self.tally["missed"] += 1
            return False
        return self._selection.matches_item(item)

    def _is_ours(self, work: WorkItem[Item]) -> bool:
        return self._consumer.assignment(work.assignment.partition) is work.assignment

    def _collect(self) -> None:
        while not self._scored.empty():
            job = self._scored.get()
            for next_job in self._order.complete(job.key, job):
                self._in_hand -= 1
                if next_job.is_wanted():
                    self._held.add(next_job, time.monotonic())
                else:
                    next_job.span.end()
        for job in self._held.take_released(time.monotonic()):
            assert job.work is not None
            self._consumer.finish([job.work], self._outputs.of_job(job))
            job.span.end()

    def _end_overdue(self) -> None:
        """Writes Ends for the open trajectories whose deadline has passed, every few seconds."""
        now = time.monotonic()
        if now < self._next_overdue_check or not self._is_untagged:
            return
        self._next_overdue_check = now + OVERDUE_INTERVAL_S
        already_written, self._expired = self._expired, {}
        for owned in self._consumer.offsets():
            assignment = self._consumer.assignment(owned.partition)
            if assignment is not None:
                self._end_overdue_in(assignment, already_written)

    def _end_overdue_in(
        self, assignment: Progress[Item], already_written: Mapping[str, Progress[Item]]
    ) -> None:
        assert isinstance(assignment.assembler, TrajectoryAssembler)
        for end, closing, trace in overdue(assignment.assembler, int(time.time() * 1000)):
            self._expired[end.end_id] = assignment
            if already_written.get(end.end_id) is not assignment:
                metrics.expired.inc()
                outputs = [
                    self._outputs.record(STEPS, end, trace),
                    self._outputs.record(TRAJECTORIES, closing),
                ]
                self._consumer.finish([], outputs, [assignment])
                log.info(
                    "trajectory %s has expired: its deadline passed",
                    end.trajectory_uid,
                    extra=log_ids(end),
                )
