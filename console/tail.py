"""A topic that is read to its end again and again, by one consumer.

Partitions are assigned once. aiokafka loses its own cancellation while it changes an assignment, and a
consumer that is closed in that moment never ends.
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


class Tail:
    """Made by `open_tail`; it begins with the first record, unless it is told otherwise."""

    def __init__(
        self, places: list[TopicPartition], consumer: AIOKafkaConsumer, codec: Codec
    ) -> None:
        self._places = places
        self._consumer = consumer
        self._codec = codec

    async def begin_at(self, when: datetime) -> None:
        stamp = int(when.timestamp() * 1000)
        with _mapped_errors():
            found = await self._consumer.offsets_for_times(dict.fromkeys(self._places, stamp))
            ends = await self._consumer.end_offsets(self._places)
        for place in self._places:
            self._consumer.seek(place, found[place].offset if found[place] else ends[place])

    async def begin_at_end(self) -> None:
        with _mapped_errors():
            ends = await self._consumer.end_offsets(self._places)
        for place, end in ends.items():
            self._consumer.seek(place, end)

    async def news(self) -> AsyncIterator[tuple[Record, int]]:
        """What was written since the last time, each record with its time in milliseconds."""
        with _mapped_errors():
            ends = await self._consumer.end_offsets(self._places)
            while not await self._is_at(ends):
                for batch in (await self._consumer.getmany(timeout_ms=200)).values():
                    for message in batch:
                        if record := self._decoded(message):
                            yield record, message.timestamp

    async def _is_at(self, ends: dict[TopicPartition, int]) -> bool:
        """Positions count, not records: the last offsets may be transaction markers."""
        for place, end in ends.items():
            if await self._consumer.position(place) < end:
                return False
        return True

    def _decoded(self, message: ConsumerRecord) -> Record | None:
        if message.value is None:
            return None  # a tombstone
        try:
            return self._codec.decode(message.value)
        except SchemaError:
            return None  # what cannot be read cannot be counted; its consumers complain


@asynccontextmanager
async def open_tail(
    connection: Connection, topic: str, partitions: int, codec: Codec
) -> AsyncIterator[Tail]:
    places = [TopicPartition(connection.topic_name(topic), number) for number in range(partitions)]
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
            await asyncio.sleep(0)  # aiokafka cannot stop tasks that have not begun
            consumer.assign(places)
            for place, first in (await consumer.beginning_offsets(places)).items():
                consumer.seek(place, first)
        yield Tail(places, consumer, codec)
    finally:
        await consumer.stop()


@contextmanager
def _mapped_errors() -> Iterator[None]:
    try:
        yield
    except (NoOffsetForPartitionError, OffsetOutOfRangeError) as error:
        raise OffsetLost(f"a topic no longer holds what it held: {error}") from error
    except KafkaError as error:
        raise BrokerUnavailable(f"the brokers went away: {error}") from error
