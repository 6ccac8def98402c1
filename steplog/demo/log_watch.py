"""The figures that the demo shows. They are read from the log only; no process is queried."""

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
from steplog.demo.agent import ChatLine

MIN_STANDARD_ERRORS = 3.0
"""By how many standard errors the last quarter must exceed the first; by chance, 1 run in 700 does."""
MAX_CONVERSATIONS = 500
"""Conversations that are kept until their reward arrives."""


class RewardGain(NamedTuple):
    """Mean rewards under the first and the last quarter of the versions."""

    first: float
    last: float
    error: float

    @property
    def is_real(self) -> bool:
        return self.last - self.first > MIN_STANDARD_ERRORS * self.error


class LogWatch:
    """Follows the log and sums up what the demo shows."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.live: int | None = None
        self.incarnation = 0
        self.is_fresh = False
        """Whether the trainer of this run has announced a live version."""
        self.steps = self.tokens = self.trained_groups = 0
        self.rewards: dict[int, list[float]] = defaultdict(list)
        """All rewards, trained on or not, by the version that sampled the trajectory's first Step."""
        self.outcomes: dict[int, Outcome] = {}
        self.example: tuple[Sequence[ChatLine], float] | None = None
        self._began_at = time.time() * 1000
        self._versions: dict[str, int] = {}
        self._conversations: dict[str, Sequence[ChatLine]] = {}
        self._rate_start: tuple[float, int] | None = None

    @asynccontextmanager
    async def following(self, connection: Connection) -> AsyncIterator[None]:
        codec = connection.codec()
        async with AsyncExitStack() as stack:
            for topic in (LEDGER, POLICY, REWARDED):
                await stack.enter_async_context(Follower(connection, topic, codec, self.apply))
            yield

    def add_conversation(self, trajectory: str, lines: Sequence[ChatLine]) -> None:
        if self._rate_start is None:
            self._rate_start = (time.monotonic(), self.steps)
        self._conversations[trajectory] = lines
        if len(self._conversations) > MAX_CONVERSATIONS:
            del self._conversations[next(iter(self._conversations))]

    def apply(self, record: Record) -> None:
        match record:
            case Step():
                self.steps += 1
                self.tokens += len(record.response_ids) // 4
                self._versions.setdefault(record.trajectory_uid, _version(record))
            case TrajectoryEnd():
                self._add_end(record)
            case PolicyVersion():
                self._add_version(record)
            case Decision():
                self.trained_groups += sum(group.verdict == "train" for group in record.groups)
            case Outcome():
                self.outcomes[record.version] = record

    def _add_end(self, end: TrajectoryEnd) -> None:
        version = self._versions.pop(end.trajectory_uid, None)
        lines = self._conversations.pop(end.trajectory_uid, None)
        if version is None or end.reward is None:
            return
        self.rewards[version].append(end.reward)
        if lines is not None:
            self.example = (lines, end.reward)

    def _add_version(self, record: PolicyVersion) -> None:
        self.incarnation = max(self.incarnation, record.incarnation)
        if record.phase == "live":
            self.live = record.version
            self.is_fresh = record.created_at >= self._began_at

    @property
    def curve(self) -> list[float]:
        """The mean reward of each version; a version without rewards repeats its predecessor's."""
        curve: list[float] = []
        for version in range(max(self.rewards, default=-1) + 1):
            rewards = self.rewards.get(version)
            curve.append(statistics.fmean(rewards) if rewards else curve[-1] if curve else 0.0)
        return curve

    @property
    def steps_per_second(self) -> float | None:
        if self._rate_start is None:
            return None
        start, steps = self._rate_start
        return (self.steps - steps) / max(time.monotonic() - start, 1.0)

    def reward_gain(self) -> RewardGain | None:
        """None if there is too little to compare."""
        versions = sorted(self.rewards)
        quarter = max(1, len(versions) // 4)
        if len(versions) < 2:
            return None
        first = [reward for version in versions[:quarter] for reward in self.rewards[version]]
        last = [reward for version in versions[-quarter:] for reward in self.rewards[version]]
        if min(len(first), len(last)) < 2:
            return None
        error = math.sqrt(sum(statistics.variance(part) / len(part) for part in (first, last)))
        return RewardGain(statistics.fmean(first), statistics.fmean(last), error)


def _version(step: Step) -> int:
    return step.segments[0].version if step.segments else 0
