"""What a worker writes for each scored trajectory: its records with rewards, and dead letters."""

import logging
from collections import Counter

from pool.connection import Connection
from pool.core.dead_letters import DeadLetter
from pool.core.trajectories import StrayRecord, Trajectory, annotate, source_position
from pool.producers.output import Output
from pool.topics import DEAD_LETTERS, STEPS, TRAJECTORIES, rewarded_topic
from reward import metrics
from reward.scoring.results import FunctionResult
from reward.scoring.rewarded import rewarded_records
from reward.scoring.scorer import ScoringJob
from schemas import Record, TrajectoryEnd
from servicekit import tracing
from servicekit.metrics import dead_letters

log = logging.getLogger(__name__)

STAGE = "reward"


class RewardOutputs:
    """Builds the outputs of a worker and counts them. `into` is the tag it writes for."""

    def __init__(self, connection: Connection, group: str, into: str | None) -> None:
        self._codec = connection.codec()
        self._group = group
        self._is_untagged = into is None
        self._rewarded = rewarded_topic(into)
        self._names = {
            topic: connection.topic_name(topic)
            for topic in (STEPS, self._rewarded, TRAJECTORIES, DEAD_LETTERS)
        }
        self.tally: Counter[str] = Counter()
        """Trajectories since the worker started, by outcome: scored, failed, unscored, missed."""

    def of_job(self, job: ScoringJob) -> list[Output]:
        item = job.item
        if isinstance(item, StrayRecord):
            copy = annotate(item.received.record, source_position(item.received))
            return [self.record(self._rewarded, copy, item.received.trace)]
        traces = [received.trace for received in item.records]
        traces[-1] = job.span.traceparent or traces[-1]
        copies = zip(rewarded_records(item, job.results), traces, strict=True)
        outputs = [self.record(self._rewarded, record, trace) for record, trace in copies]
        failure = job.failure
        self._count(item, job)
        if failure is None:
            return outputs
        job.span.fail(failure.name)
        # The log line leaves the reason out: it may quote the answer.
        log.warning(
            "trajectory %s: reward %s failed; the reason is in the trajectory's End in %s",
            item.uid,
            failure.name,
            self._names[self._rewarded],
            extra=log_ids(item.end),
        )
        return [*outputs, self._dead_letter(item, failure)] if self._is_untagged else outputs

    def _count(self, trajectory: Trajectory, job: ScoringJob) -> None:
        channel = trajectory.end.channel
        label = channel if channel in ("train", "val") else "other"
        for result in job.results:
            if result.failure is not None:
                metrics.failures.labels(result.name).inc()
            elif result.value is not None:
                metrics.values.labels(result.name, label).observe(result.value)
                metrics.scores.labels(result.name, label).observe(result.value)
        metrics.processed.labels("failed" if job.failure else trajectory.status).inc()
        self.tally["failed" if job.failure else "scored" if job.results else "unscored"] += 1

    def _dead_letter(self, trajectory: Trajectory, failure: FunctionResult) -> Output:
        """The End of a trajectory that could not be scored, as it is in the log."""
        reason = f"reward {failure.name}: {failure.failure}"
        position, end = trajectory.ended, trajectory.end
        key, value = trajectory.prompt_uid.encode(), self._codec.encode(end, self._names[STEPS])
        letter = DeadLetter(
            self._names[STEPS], position.partition, position.offset, key, value, (), end.created_at
        )
        dead_letters.labels(STAGE, failure.name).inc()
        return Output(
            self._names[DEAD_LETTERS], key, value, letter.headers_with(self._group, reason)
        )

    def record(self, topic: str, record: Record, trace: str = "") -> Output:
        name = self._names[topic]
        key = getattr(record, "trajectory_uid" if topic == TRAJECTORIES else "prompt_uid", None)
        return Output(name, key, self._codec.encode(record, name), tracing.headers(trace))


def log_ids(end: TrajectoryEnd) -> dict[str, str]:
    """The ids that log lines and spans carry."""
    return {
        "trajectory_uid": end.trajectory_uid,
        "prompt_uid": end.prompt_uid,
        "run": end.run,
    }
