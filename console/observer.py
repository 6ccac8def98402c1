"""Takes snapshots of a cluster repeatedly, and keeps what makes the next one cheap."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta

from console.backlog import Backlog
from console.cluster import Cluster, ClusterFacts, GroupFacts, PartitionId
from console.record_times import RecordTimes, Start
from console.snapshot import ClusterSnapshot, GroupLag, group_lag, partition_lag
from console.tail import TopicTail, open_tail
from pool.connection import Connection
from pool.topics import LEDGER, POLICY, TOPICS, TRAJECTORIES
from schemas import Decision, PolicyVersion, Registration
from servicekit.errors import TopicMismatch

CLOCK_MARGIN = timedelta(hours=1)
"""Decisions are searched from the time of the oldest registration on. Different machines wrote the two;
a wider margin only costs more reading."""


class BacklogReader:
    """Keeps a Backlog up to date from its three topics."""

    def __init__(self, trajectories: TopicTail, ledger: TopicTail, policy: TopicTail) -> None:
        self.backlog = Backlog()
        self._trajectories, self._ledger, self._policy = trajectories, ledger, policy
        self._is_first = True

    async def read(self) -> None:
        async for record, written_at in self._trajectories.read_new():
            if isinstance(record, Registration):
                self.backlog.register(record, written_at)
        if self._is_first:
            await self._find_decisions()
        async for record, _ in self._ledger.read_new():
            if isinstance(record, Decision):
                self.backlog.decide(record)
        async for record, _ in self._policy.read_new():
            if isinstance(record, PolicyVersion):
                self.backlog.add_version(record)
        self.backlog.finish_first_reading()
        self.backlog.forget_before(int(time.time() * 1000) - TOPICS[TRAJECTORIES].retention)
        self._is_first = False

    async def _find_decisions(self) -> None:
        """Skip the part of the ledger about groups that are long done: a long run's ledger is large."""
        oldest = self.backlog.oldest_written()
        if oldest is None:
            await self._ledger.seek_to_end()
        else:
            await self._ledger.seek_to_time(
                datetime.fromtimestamp(oldest / 1000, UTC) - CLOCK_MARGIN
            )


class Observer:
    """Takes snapshots of one cluster."""

    def __init__(
        self,
        connection: Connection,
        cluster: Cluster,
        record_times: RecordTimes,
        backlog: BacklogReader | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._connection = connection
        self._cluster = cluster
        self._record_times = record_times
        self._backlog = backlog
        self._clock = clock

    async def observe(self) -> ClusterSnapshot:
        facts = await asyncio.to_thread(self._cluster.fetch)
        written_at = await self._record_times.written_at(_unprocessed(facts))
        if self._backlog is not None:
            await self._backlog.read()
        now = self._clock()
        return ClusterSnapshot(
            at=f"{datetime.fromtimestamp(now, UTC):%Y-%m-%dT%H:%M:%SZ}",
            bootstrap=self._connection.bootstrap,
            brokers=facts.brokers,
            groups=_groups(facts, written_at, now),
            runs=self._backlog.backlog.runs() if self._backlog is not None else [],
            topics=list(facts.bounds.values()),
        )


@asynccontextmanager
async def open_observer(connection: Connection, *, work: bool = True) -> AsyncIterator[Observer]:
    """`work`: also count open trajectories and groups, from the topics that record them."""
    cluster = await asyncio.to_thread(Cluster, connection)
    partitions = [*(await asyncio.to_thread(cluster.fetch)).bounds]
    # Missing topics are reported before anything is opened.
    topics = (TRAJECTORIES, LEDGER, POLICY) if work else ()
    unopened = [_make_tail(connection, topic, partitions) for topic in topics]
    async with AsyncExitStack() as stack:
        times = await stack.enter_async_context(RecordTimes(connection, partitions))
        tails = [await stack.enter_async_context(tail) for tail in unopened]
        yield Observer(connection, cluster, times, BacklogReader(*tails) if tails else None)


def _make_tail(
    connection: Connection, topic: str, partitions: Sequence[PartitionId]
) -> AbstractAsyncContextManager[TopicTail]:
    name = connection.topic_name(topic)
    count = sum(partition.topic == name for partition in partitions)
    if not count:
        raise TopicMismatch(
            f"Topic {name} does not exist at {connection.bootstrap}. "
            "`steplog topics list` shows which topics exist, `steplog topics create` creates them."
        )
    return open_tail(connection, topic, count, connection.codec())


def _next_offsets(facts: ClusterFacts, group: GroupFacts) -> dict[PartitionId, int]:
    """The next offset of the group, in every partition of the topics that it reads."""
    topics = group.topics()
    return {
        partition: group.commits[partition].offset if partition in group.commits else bounds.oldest
        for partition, bounds in facts.bounds.items()
        if partition.topic in topics
    }


def _unprocessed(facts: ClusterFacts) -> set[Start]:
    """The next offset of every group in every partition that has unprocessed records."""
    return {
        (partition, offset)
        for group in facts.groups.values()
        for partition, offset in _next_offsets(facts, group).items()
        if offset < facts.bounds[partition].end
    }


def _groups(facts: ClusterFacts, written_at: dict[Start, float], now: float) -> list[GroupLag]:
    return [
        group_lag(
            name,
            topic,
            group.members,
            [
                partition_lag(
                    facts.bounds[partition],
                    group.commits.get(partition),
                    written_at.get((partition, offset)),
                    now,
                )
                for partition, offset in _next_offsets(facts, group).items()
                if partition.topic == topic
            ],
        )
        for name, group in facts.groups.items()
        for topic in sorted(group.topics())
    ]
