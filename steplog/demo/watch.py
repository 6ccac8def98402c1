"""What the demo shows, read from the log while it is written: nothing is asked of the processes."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from pool.connection import Connection
from pool.readers.follower import Follower
from pool.topics import LEDGER, POLICY, REWARDED
from schemas import Decision, Outcome, PolicyVersion, Record, Step, TrajectoryEnd
from steplog.demo.agent import Line

ERRORS = 3.0
"""Standard errors by which the last quarter must exceed the first; chance does so once in 700 runs."""
HEARD = 500
"""Conversations that wait for their reward."""


class Climb(NamedTuple):
    """Mean rewards of what the versions of the first quarter sampled, and of the last."""

    first: float
    last: float
    error: float

    @property
    def is_real(self) -> bool:
        return self.last - self.first > ERRORS * self.error


class Watch:
    def __init__(self) -> None:
        self.began = time.monotonic()
        self.live: int | None = None
        self.incarnation = 0
        self.is_fresh = False
        """Whether this start's trainer has said that a version is live."""
        self.steps = self.tokens = self.trained_groups = 0
        self.rewards: dict[int, list[float]] = defaultdict(list)
        """By the version that sampled a trajectory's first Step; all of them, trained or not."""
        self.outcomes: dict[int, Outcome] = {}
        self.example: tuple[Sequence[Line], float] | None = None
        self._began_at = time.time() * 1000
        self._versions: dict[str, int] = {}
        self._heard: dict[str, Sequence[Line]] = {}
        self._counted_from: tuple[float, int] | None = None

    @asynccontextmanager
    async def following(self, connection: Connection) -> AsyncIterator[None]:
        codec = connection.codec()
        async with AsyncExitStack() as stack:
            for topic in (LEDGER, POLICY, REWARDED):
                await stack.enter_async_context(Follower(connection, topic, codec, self.apply))
            yield

    def heard(self, trajectory: str, lines: Sequence[Line]) -> None:
        if self._counted_from is None:
            self._counted_from = (time.monotonic(), self.steps)
        self._heard[trajectory] = lines
        if len(self._heard) > HEARD:
            del self._heard[next(iter(self._heard))]

    def apply(self, record: Record) -> None:
        match record:
            case Step():
                self.steps += 1
                self.tokens += len(record.response_ids) // 4
                self._versions.setdefault(record.trajectory_uid, _version(record))
            case TrajectoryEnd():
                self._end(record)
            case PolicyVersion():
                self._policy(record)
            case Decision():
                self.trained_groups += sum(group.verdict == "train" for group in record.groups)
            case Outcome():
                self.outcomes[record.version] = record

    def _end(self, end: TrajectoryEnd) -> None:
        version = self._versions.pop(end.trajectory_uid, None)
        lines = self._heard.pop(end.trajectory_uid, None)
        if version is None or end.reward is None:
            return
        self.rewards[version].append(end.reward)
        if lines is not None:
            self.example = (lines, end.reward)

    def _policy(self, record: PolicyVersion) -> None:
        self.incarnation = max(self.incarnation, record.incarnation)
        if record.phase == "live":
            self.live = record.version
            self.is_fresh = record.created_at >= self._began_at

    @property
    def curve(self) -> list[float]:
        """Mean reward by version; one without rewards has its predecessor's."""
        curve: list[float] = []
        for version in range(max(self.rewards, default=-1) + 1):
            found = self.rewards.get(version)
            curve.append(statistics.fmean(found) if found else curve[-1] if curve else 0.0)
        return curve

    @property
    def steps_per_second(self) -> float | None:
        if self._counted_from is None:
            return None
        since, steps = self._counted_from
        return (self.steps - steps) / max(time.monotonic() - since, 1.0)

    def climb(self) -> Climb | None:
        """None with too little to compare."""
        versions = sorted(self.rewards)
        quarter = max(1, len(versions) // 4)
        if len(versions) < 2:
            return None
        first = [reward for version in versions[:quarter] for reward in self.rewards[version]]
        last = [reward for version in versions[-quarter:] for reward in self.rewards[version]]
        if min(len(first), len(last)) < 2:
            return None
        error = math.sqrt(sum(statistics.variance(part) / len(part) for part in (first, last)))
        return Climb(statistics.fmean(first), statistics.fmean(last), error)


def _version(step: Step) -> int:
    return step.segments[0].version if step.segments else 0
