"""Policy marks: how old a record is, from offsets alone.

Before any engine can hold version v, the end offsets of all partitions are sampled: the `opened`
marks of v. So everything that v generated lies at or after them; no clock and no producer has to be
trusted. The version by offset of a record is the newest version whose mark lies at or before it; the
version that generated the record is never newer. Its age at version V is the sum of two parts:

    V - version by offset                 queue age: how long it waited in the log
    version by offset - oldest segment    in-flight age: how long its generation took
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from pool.core.groups import TRAIN, Judgement
from pool.core.progress import Received
from pool.core.trajectories import Trajectory, source_position, step_of
from schemas import PolicyVersion, Position


class Age(NamedTuple):
    """The age of a trajectory, in versions."""

    queue: int
    in_flight: int

    @property
    def total(self) -> int:
        return self.queue + self.in_flight


class UnknownAge(ValueError):
    """The age of a record cannot be computed, or the record claims an impossible version."""


class PolicyMarks:
    """The marks of one run, folded from its PolicyVersion records in the order of the topic."""

    def __init__(self, run: str, records: Iterable[PolicyVersion] = ()) -> None:
        self.run = run
        self.incarnation = 0
        """The highest one so far; the next start of the trainer takes the number above it."""
        self.opened: int | None = None
        self.live: int | None = None
        self._versions: list[int] = []
        self._steps: list[list[int]] = []
        self._rewarded: list[list[int]] = []
        self.topic: str | None = None
        """The topic of rewards that the run is trained from."""
        for record in records:
            self.add(record)

    def add(self, record: PolicyVersion) -> None:
        if record.run != self.run:
            return
        self.incarnation = max(self.incarnation, record.incarnation)
        if record.phase == "opened":
            self._open(record)
        elif record.phase == "live":
            self.live = record.version

    def _open(self, record: PolicyVersion) -> None:
        # A trainer that lost its last step opens that version again; the earliest marks are safe.
        if self.opened is not None and record.version <= self.opened:
            return
        self.opened = record.version
        self._versions.append(record.version)
        self._steps.append(record.steps_marks)
        self._rewarded.append(record.rewarded_marks)
        self.topic = record.topic

    def is_opened(self, version: int) -> bool:
        return version in self._versions

    def opened_at(self, version: int) -> tuple[list[int], list[int]]:
        """The marks of a version in `steps` and in its topic of rewards: nothing that `version`
        generated lies before them."""
        index = self._versions.index(version)
        return self._steps[index], self._rewarded[index]

    def version_at(self, position: Position) -> int | None:
        """The newest version that can have generated the record at this position in `steps`."""
        count = bisect_right(
            self._steps, position.offset, key=lambda marks: _mark(marks, position.partition)
        )
        return self._versions[count - 1] if count else None

    def stale_below(self, version: int, partition: int) -> int:
        """Offset in `rewarded` below which every record is certainly older than `version`."""
        count = bisect_right(self._versions, version)
        return _mark(self._rewarded[count - 1], partition) if count else 0

    def age(self, trajectory: Trajectory, version: int) -> Age:
        """The age of the oldest token of a trajectory when `version` is the newest."""
        foreign = runs_of(trajectory) - {self.run}
        if foreign:
            raise UnknownAge(f"it belongs to run {min(foreign)}, not {self.run}")
        if trajectory.is_scored:
            return Age(version - self._version_when_posted(trajectory.began), 0)
        return max(
            (self._step_age(received, version) for received in trajectory.steps),
            key=lambda age: age.total,
            default=Age(0, 0),
        )

    def _version_when_posted(self, position: Position) -> int:
        """The newest version when a group was posted to its topic of rewards. How long its generation
        took before that is not known."""
        count = bisect_right(
            self._rewarded, position.offset, key=lambda marks: _mark(marks, position.partition)
        )
        if not count:
            raise UnknownAge("it was posted before any version was open")
        return self._versions[count - 1]

    def _step_age(self, received: Received, version: int) -> Age:
        step, position = step_of(received), source_position(received)
        newest = self.version_at(position)
        if newest is None or not step.segments:
            raise UnknownAge(f"step {step.step_id} does not say which version sampled it")
        oldest = min(segment.oldest_version for segment in step.segments)
        if max(segment.version for segment in step.segments) > newest:
            raise UnknownAge(
                f"step {step.step_id} claims a version newer than {newest}, "
                "the newest that was open at its offset"
            )
        return Age(version - newest, newest - oldest)

    def judge(
        self, trajectory: Trajectory, version: int, max_age: int, accept_runs: frozenset[str]
    ) -> Judgement:
        """Whether a trajectory is fresh enough to train `version`'s successor."""
        foreign = runs_of(trajectory) - {self.run}
        if foreign and foreign <= accept_runs:
            return TRAIN
        try:
            age = self.age(trajectory, version)
        except UnknownAge as unknown:
            return Judgement("invalid", str(unknown))
        if age.total > max_age:
            return Judgement(
                "stale",
                f"{age.total} versions old ({age.queue} in the queue, {age.in_flight} in flight), "
                f"{max_age} are allowed",
            )
        return TRAIN


def runs_of(trajectory: Trajectory) -> set[str]:
    """The runs of a trajectory: more than one if a new run began while it was generated."""
    return {trajectory.end.run, *(step_of(received).run for received in trajectory.steps)}


def _mark(marks: list[int], partition: int) -> int:
    return marks[partition] if partition < len(marks) else 0
