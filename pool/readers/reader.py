"""Reading a topic without joining a consumer group: for commands, followers and replay.

Readers see committed records only, in the order of their partition. They commit nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from typing import NamedTuple

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, NoOffsetForPartitionError, OffsetOutOfRangeError
from aiokafka.partitioner import murmur2

from pool.connection import MAX_MESSAGE_BYTES, Connection
from pool.topics import find_topics
from schemas import Codec, Record
from servicekit.errors import BrokerUnavailable, OffsetLost, TopicMismatch


class PartitionBounds(NamedTuple):
    """The first offset of a partition and the one after the last."""

    low: int
    end: int


class TopicReader:
    """One topic, open for reading; created by `open_topic`."""

    def __init__(self, topic: str, partitions: int, consumer: AIOKafkaConsumer) -> None:
        self.topic = topic
        self.partitions = range(partitions)
        self._consumer = consumer

    async def bounds(self, partitions: Sequence[int]) -> dict[int, PartitionBounds]:
        topic_partitions = self._topic_partitions(partitions)
        with self._mapped_errors():
            low = await self._consumer.beginning_offsets(topic_partitions)
            end = await self._consumer.end_offsets(topic_partitions)
        return {key.partition: PartitionBounds(low[key], end[key]) for key in topic_partitions}

    async def ends(self, partitions: Sequence[int]) -> dict[int, int]:
        """The offset after the last record of each partition."""
        with self._mapped_errors():
            ends = await self._consumer.end_offsets(self._topic_partitions(partitions))
        return {key.partition: offset for key, offset in ends.items()}

    async def offsets_at(self, time: datetime, partitions: Sequence[int]) -> dict[int, int]:
        """In each partition the first offset that was written at `time` or later."""
        timestamp = int(time.timestamp() * 1000)
        times = dict.fromkeys(self._topic_partitions(partitions), timestamp)
        with self._mapped_errors():
            offsets = await self._consumer.offsets_for_times(times)
        bounds = await self.bounds(partitions)
        return {
            key.partition: at.offset if at else bounds[key.partition].end
            for key, at in offsets.items()
        }

    def _topic_partitions(self, partitions: Iterable[int]) -> list[TopicPartition]:
        return [TopicPartition(self.topic, number) for number in partitions]

    def partition_of(self, key: str) -> int:
        """The partition to which all of our producers write the records of a key."""
        return int((murmur2(key.encode()) & 0x7FFFFFFF) % len(self.partitions))

    async def read(
        self,
        starts: Mapping[int, int],
        ends: Mapping[int, int] | None = None,
        moved: Callable[[dict[int, int]], None] | None = None,
    ) -> AsyncIterator[ConsumerRecord]:
        """Records from `starts` on, up to `ends`; without ends it never stops. After each batch `moved`
        is called with the positions, which may lie behind the last record because of transaction
        markers."""
        topic_partitions = self._topic_partitions(starts)
        self._consumer.assign(topic_partitions)
        for key in topic_partitions:
            self._consumer.seek(key, starts[key.partition])
        while ends is None or not await self._is_over(ends):
            with self._mapped_errors():
                batches = await self._consumer.getmany(timeout_ms=200)
            for batch in batches.values():
                for record in batch:
                    if ends is None or record.offset < ends[record.partition]:
                        yield record
            if moved is not None:
                moved({p.partition: await self._consumer.position(p) for p in topic_partitions})

    async def read_all(self) -> AsyncIterator[ConsumerRecord]:
        """All records that the topic has at this moment."""
        bounds = await self.bounds(self.partitions)
        starts = {number: bound.low for number, bound in bounds.items()}
        ends = {number: bound.end for number, bound in bounds.items()}
        async for record in self.read(starts, ends):
            yield record

    async def _is_over(self, ends: Mapping[int, int]) -> bool:
        """Positions count, not records: the last offsets may be transaction markers."""
        with self._mapped_errors():
            for number, end in ends.items():
                if await self._consumer.position(TopicPartition(self.topic, number)) < end:
                    return False
        return True

    @contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except (NoOffsetForPartitionError, OffsetOutOfRangeError) as error:
            raise OffsetLost(
                f"{self.topic} no longer has, or does not yet have, that offset: {error}"
            ) from error
        except KafkaError as error:
            raise BrokerUnavailable(f"{self.topic} cannot be read: {error}") from error


@asynccontextmanager
async def open_topic(
    connection: Connection, topic: str, poll_ms: int = 500
) -> AsyncIterator[TopicReader]:
    """Opens a topic, named without the prefix. `poll_ms` is how long a broker may hold a fetch request
    while there are no new records."""
    name = connection.topic_name(topic)
    layouts = await asyncio.to_thread(find_topics, connection)
    if topic not in layouts:
        raise TopicMismatch(
            f"Topic {name} does not exist at {connection.bootstrap}; "
            "`steplog topics list` shows those that do"
        )
    consumer = AIOKafkaConsumer(
        **connection.aiokafka(
            isolation_level="read_committed",
            auto_offset_reset="none",
            enable_auto_commit=False,
            max_partition_fetch_bytes=MAX_MESSAGE_BYTES,
            fetch_max_wait_ms=poll_ms,
            # aiokafka waits this long when it first asks for a topic: most of the time of a short read.
            retry_backoff_ms=20,
        )
    )
    reader = TopicReader(name, layouts[topic].partitions, consumer)
    try:
        await consumer.start()
        await asyncio.sleep(0)  # aiokafka cannot stop tasks that have not begun
        yield reader
    except KafkaError as error:
        raise BrokerUnavailable(f"{connection.bootstrap} is not available: {error}") from error
    finally:
        await consumer.stop()


def read_bounds(connection: Connection, topic: str) -> dict[int, PartitionBounds]:
    """The bounds of all partitions of a topic at this moment."""

    async def request() -> dict[int, PartitionBounds]:
        async with open_topic(connection, topic) as reader:
            return await reader.bounds(reader.partitions)

    return asyncio.run(request())


async def read_records(connection: Connection, topic: str, codec: Codec) -> list[Record]:
    """All records of a topic that fits into memory, such as the ledger."""
    async with open_topic(connection, topic) as reader:
        messages = [message async for message in reader.read_all()]
    return [codec.decode(m.value) for m in messages if m.value is not None]
