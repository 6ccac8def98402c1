"""When the records at given offsets were written, found by reading one record per partition.

Kafka can look up offsets by time but not the time of an offset, so there is no other way.
Partitions are assigned once and stay paused between requests (see `console.tail` for the reason).
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Set
from types import TracebackType
from typing import Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from console.cluster import PartitionId
from pool.connection import Connection
from servicekit.errors import BrokerUnavailable

READ_LIMIT_S = 3.0
"""Seconds for all partitions. There may be no record to find, but only transaction markers."""
FETCH_BYTES = 1
"""A broker returns at least one batch, however small the limit; more than one is not needed here."""

Start = tuple[PartitionId, int]
"""A partition, and the offset of the first record there that a group has not processed."""


class RecordTimes:
    """The times of records in a fixed set of partitions; they are cached."""

    def __init__(self, connection: Connection, partitions: Iterable[PartitionId]) -> None:
        self._connection = connection
        self._partitions = {one: TopicPartition(*one) for one in partitions}
        self._times: dict[Start, float] = {}

    async def __aenter__(self) -> Self:
        self._consumer = AIOKafkaConsumer(
            **self._connection.aiokafka(
                # Records of open transactions are unprocessed too.
                isolation_level="read_uncommitted",
                # If retention has deleted the record, the oldest remaining one counts.
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                max_partition_fetch_bytes=FETCH_BYTES,
            )
        )
        try:
            await self._consumer.start()
            await asyncio.sleep(0)  # aiokafka cannot stop tasks that have not started
            self._consumer.assign(list(self._partitions.values()))
            self._consumer.pause(*self._partitions.values())
        except KafkaError as error:
            await self._consumer.stop()
            raise BrokerUnavailable(
                f"The connection to {self._connection.bootstrap} was lost: {error}"
            ) from error
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._consumer.stop()

    async def written_at(self, starts: Set[Start]) -> dict[Start, float]:
        """Unix timestamps; offsets without a record are left out."""
        self._times = {start: time_ for start, time_ in self._times.items() if start in starts}
        missing = {start for start in starts if start[0] in self._partitions} - self._times.keys()
        while missing:
            # Groups may be at different offsets of a partition, but a consumer has one position there.
            one_each = dict(missing)
            self._times |= await self._read_times(one_each)
            missing -= one_each.items()
        return dict(self._times)

    async def _read_times(self, starts: Mapping[PartitionId, int]) -> dict[Start, float]:
        wanted = {self._partitions[one]: (one, offset) for one, offset in starts.items()}
        try:
            for partition, (_, offset) in wanted.items():
                self._consumer.seek(partition, offset)
            self._consumer.resume(*wanted)
            timestamps = await self._read_first(set(wanted))
            self._consumer.pause(*wanted)
        except KafkaError as error:
            raise BrokerUnavailable(
                f"The connection to {self._connection.bootstrap} was lost: {error}"
            ) from error
        return {wanted[partition]: stamp / 1000 for partition, stamp in timestamps.items()}

    async def _read_first(self, missing: set[TopicPartition]) -> dict[TopicPartition, int]:
        timestamps: dict[TopicPartition, int] = {}
        deadline = time.monotonic() + READ_LIMIT_S
        while missing and time.monotonic() < deadline:
            batches = await self._consumer.getmany(*missing, timeout_ms=500)
            for partition, records in batches.items():
                if records:
                    timestamps[partition] = records[0].timestamp
                    missing.discard(partition)
                    self._consumer.pause(partition)
        return timestamps
