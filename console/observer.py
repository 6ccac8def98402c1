"""Looks at a cluster again and again, and keeps what makes the next look cheap."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta

from console.cluster import Cluster, Facts, GroupFacts, Place
from console.first_records import FirstRecords, Start
from console.look import GroupLag, Look, group_lag, partition_lag
from console.tail import Tail, open_tail
from console.work import Work
from pool.connection import Connection
from pool.topics import LEDGER, POLICY, TOPICS, TRAJECTORIES
from schemas import Decision, PolicyVersion, Registration
from servicekit.errors import TopicMismatch

CLOCKS_DIFFER = timedelta(hours=1)
"""Decisions are looked for from the oldest registration's time on. The two were stamped by different
machines; a wider margin costs a longer reading, nothing else."""


class WorkReader:
    """Keeps the Work up to date with its three topics."""

    def __init__(self, trajectories: Tail, ledger: Tail, policy: Tail) -> None:
        self.work = Work()
        self._trajectories, self._ledger, self._policy = trajectories, ledger, policy
        self._is_first = True

    async def read(self) -> None:
        async for record, written_at in self._trajectories.news():
            if isinstance(record, Registration):
                self.work.register(record, written_at)
        if self._is_first:
            await self._find_decisions()
        async for record, _ in self._ledger.news():
            if isinstance(record, Decision):
                self.work.decide(record)
        async for record, _ in self._policy.news():
            if isinstance(record, PolicyVersion):
                self.work.open(record)
        self.work.everything_was_read()
        self.work.forget_before(int(time.time() * 1000) - TOPICS[TRAJECTORIES].retention)
        self._is_first = False

    async def _find_decisions(self) -> None:
        """A long run's ledger is large, and most of it is about what is done."""
        oldest = self.work.oldest_written()
        if oldest is None:
            await self._ledger.begin_at_end()
        else:
            when = datetime.fromtimestamp(oldest / 1000, UTC) - CLOCKS_DIFFER
            await self._ledger.begin_at(when)


class Observer:
    def __init__(
        self,
        connection: Connection,
        cluster: Cluster,
        records: FirstRecords,
        work: WorkReader | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._connection = connection
        self._cluster = cluster
        self._records = records
        self._work = work
        self._clock = clock

    async def look(self) -> Look:
        facts = await asyncio.to_thread(self._cluster.ask)
        written_at = await self._records.written_at(_waiting(facts))
        if self._work is not None:
            await self._work.read()
        now = self._clock()
        return Look(
            at=f"{datetime.fromtimestamp(now, UTC):%Y-%m-%dT%H:%M:%SZ}",
            bootstrap=self._connection.bootstrap,
            brokers=facts.brokers,
            groups=_groups(facts, written_at, now),
            runs=self._work.work.runs() if self._work is not None else [],
            topics=list(facts.bounds.values()),
        )


@asynccontextmanager
async def open_observer(connection: Connection, *, work: bool = True) -> AsyncIterator[Observer]:
    """`work`: read the topics that tell of trajectories and groups."""
    cluster = await asyncio.to_thread(Cluster, connection)
    places = [*(await asyncio.to_thread(cluster.ask)).bounds]
    # Topics that are missing are told of before anything is opened.
    followed = (TRAJECTORIES, LEDGER, POLICY) if work else ()
    opened = [_tail(connection, topic, places) for topic in followed]
    async with AsyncExitStack() as stack:
        records = await stack.enter_async_context(FirstRecords(connection, places))
        tails = [await stack.enter_async_context(one) for one in opened]
        yield Observer(connection, cluster, records, WorkReader(*tails) if tails else None)


def _tail(
    connection: Connection, topic: str, places: Sequence[Place]
) -> AbstractAsyncContextManager[Tail]:
    name = connection.topic_name(topic)
    partitions = sum(place.topic == name for place in places)
    if not partitions:
        raise TopicMismatch(
            f"topic {name} does not exist at {connection.bootstrap}; "
            "`steplog topics list` says which do"
        )
    return open_tail(connection, topic, partitions, connection.codec())


def _starts(facts: Facts, group: GroupFacts) -> dict[Place, int]:
    """Where the group goes on, in every partition of the topics that it reads."""
    topics = group.topics()
    return {
        place: group.commits[place].offset if place in group.commits else bounds.oldest
        for place, bounds in facts.bounds.items()
        if place.topic in topics
    }


def _waiting(facts: Facts) -> set[Start]:
    """The places at which something lies that was not processed."""
    return {
        (place, start)
        for group in facts.groups.values()
        for place, start in _starts(facts, group).items()
        if start < facts.bounds[place].end
    }


def _groups(facts: Facts, written_at: dict[Start, float], now: float) -> list[GroupLag]:
    return [
        group_lag(
            name,
            topic,
            group.members,
            [
                partition_lag(
                    facts.bounds[place],
                    group.commits.get(place),
                    written_at.get((place, start)),
                    now,
                )
                for place, start in _starts(facts, group).items()
                if place.topic == topic
            ],
        )
        for name, group in facts.groups.items()
        for topic in sorted(group.topics())
    ]
