"""When the first record was written that a group has not processed: one record per partition is read.

Kafka knows offsets by time and not the time of an offset, so there is no other way. Partitions are
assigned once and rest until somebody asks (see `console.tail`).
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Set
from types import TracebackType
from typing import Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from console.cluster import Place
from pool.connection import Connection
from servicekit.errors import BrokerUnavailable

PATIENCE = 3.0
"""Seconds for all partitions. There may be nothing to find: only transaction markers are left."""
FETCH_BYTES = 1
"""A broker gives at least one batch, whatever is asked for; more than one is of no use here."""

Start = tuple[Place, int]
"""A partition, and the offset at which a group goes on there."""


class FirstRecords:
    """Of the places that it is made for; the answers stay."""

    def __init__(self, connection: Connection, places: Iterable[Place]) -> None:
        self._connection = connection
        self._places = {place: TopicPartition(*place) for place in places}
        self._found: dict[Start, float] = {}

    async def __aenter__(self) -> Self:
        self._consumer = AIOKafkaConsumer(
            **self._connection.aiokafka(
                # What an open transaction has written waits as well.
                isolation_level="read_uncommitted",
                # A record that was deleted meanwhile is none that waits: begin with the oldest left.
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                max_partition_fetch_bytes=FETCH_BYTES,
            )
        )
        try:
            await self._consumer.start()
            await asyncio.sleep(0)  # aiokafka cannot stop tasks that have not begun
            self._consumer.assign(list(self._places.values()))
            self._consumer.pause(*self._places.values())
        except KafkaError as error:
            await self._consumer.stop()
            raise BrokerUnavailable(f"{self._connection.bootstrap} went away: {error}") from error
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._consumer.stop()

    async def written_at(self, starts: Set[Start]) -> dict[Start, float]:
        """In seconds since the epoch; where there is no record, there is no answer."""
        self._found = {start: at for start, at in self._found.items() if start in starts}
        missing = {start for start in starts if start[0] in self._places} - self._found.keys()
        while missing:
            # Groups may stand at different offsets of a partition; a consumer has one position there.
            one_each = dict(missing)
            self._found |= await self._ask(one_each)
            missing -= one_each.items()
        return dict(self._found)

    async def _ask(self, starts: Mapping[Place, int]) -> dict[Start, float]:
        asked = {self._places[place]: (place, at) for place, at in starts.items()}
        try:
            for partition, (_, at) in asked.items():
                self._consumer.seek(partition, at)
            self._consumer.resume(*asked)
            found = await self._read(set(asked))
            self._consumer.pause(*asked)
        except KafkaError as error:
            raise BrokerUnavailable(f"{self._connection.bootstrap} went away: {error}") from error
        return {asked[partition]: stamp / 1000 for partition, stamp in found.items()}

    async def _read(self, missing: set[TopicPartition]) -> dict[TopicPartition, int]:
        found: dict[TopicPartition, int] = {}
        deadline = time.monotonic() + PATIENCE
        while missing and time.monotonic() < deadline:
            batches = await self._consumer.getmany(*missing, timeout_ms=500)
            for partition, records in batches.items():
                if records:
                    found[partition] = records[0].timestamp
                    missing.discard(partition)
                    self._consumer.pause(partition)
        return found
