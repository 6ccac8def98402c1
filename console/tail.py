"""Reads what is new in a topic, each time up to its end, with one consumer.

Partitions are assigned only once. While aiokafka changes an assignment it can lose its own
cancellation, and a consumer that is closed at that moment never stops.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, NoOffsetForPartitionError, OffsetOutOfRangeError

from pool.connection import MAX_MESSAGE_BYTES, Connection
from schemas import Codec, Record, SchemaError
from servicekit.errors import BrokerUnavailable, OffsetLost


class TopicTail:
    """Made by `open_tail`. It starts with the first record, unless it seeks before the first
    reading."""

    def __init__(
        self, partitions: list[TopicPartition], consumer: AIOKafkaConsumer, codec: Codec
    ) -> None:
        self._partitions = partitions
        self._consumer = consumer
        self._codec = codec

    async def seek_to_time(self, start: datetime) -> None:
        timestamp = int(start.timestamp() * 1000)
        with _mapped_errors():
            offsets = await self._consumer.offsets_for_times(
                dict.fromkeys(self._partitions, timestamp)
            )
            ends = await self._consumer.end_offsets(self._partitions)
        for partition in self._partitions:
            start_offset = offsets[partition]
            end = ends[partition]
            self._consumer.seek(partition, start_offset.offset if start_offset else end)

    async def seek_to_end(self) -> None:
        with _mapped_errors():
            ends = await self._consumer.end_offsets(self._partitions)
        for partition, end in ends.items():
            self._consumer.seek(partition, end)

    async def read_new(self) -> AsyncIterator[tuple[Record, int]]:
        """The records since the last call, each with its timestamp in milliseconds."""
        with _mapped_errors():
            ends = await self._consumer.end_offsets(self._partitions)
            while not await self._has_reached(ends):
                for batch in (await self._consumer.getmany(timeout_ms=200)).values():
                    for message in batch:
                        if record := self._decode(message):
                            yield record, message.timestamp

    async def _has_reached(self, ends: dict[TopicPartition, int]) -> bool:
        """Positions are compared, not records: the last offsets may be transaction markers."""
        for partition, end in ends.items():
            if await self._consumer.position(partition) < end:
                return False
        return True

    def _decode(self, message: ConsumerRecord) -> Record | None:
        if message.value is None:
            return None  # a tombstone
        try:
            return self._codec.decode(message.value)
        except SchemaError:
            return None  # it cannot be counted; its consumers report it


@asynccontextmanager
async def open_tail(
    connection: Connection, topic: str, partitions: int, codec: Codec
) -> AsyncIterator[TopicTail]:
    name = connection.topic_name(topic)
    assigned = [TopicPartition(name, number) for number in range(partitions)]
    consumer = AIOKafkaConsumer(
        **connection.aiokafka(
            isolation_level="read_committed",
            auto_offset_reset="none",
            enable_auto_commit=False,
            max_partition_fetch_bytes=MAX_MESSAGE_BYTES,
        )
    )
    try:
        with _mapped_errors():
            await consumer.start()
            await asyncio.sleep(0)  # aiokafka cannot stop tasks that have not started
            consumer.assign(assigned)
            for partition, first in (await consumer.beginning_offsets(assigned)).items():
                consumer.seek(partition, first)
        yield TopicTail(assigned, consumer, codec)
    finally:
        await consumer.stop()


@contextmanager
def _mapped_errors() -> Iterator[None]:
    try:
        yield
    except (NoOffsetForPartitionError, OffsetOutOfRangeError) as error:
        raise OffsetLost(f"Records were deleted while they were read: {error}") from error
    except KafkaError as error:
        raise BrokerUnavailable(f"The connection to the brokers was lost: {error}") from error
