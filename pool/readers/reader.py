"""Reading a topic without joining a group: for people, followers and replay.

Readers see committed records only, in the order of their partition. They commit nothing and hold
nobody up.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
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
    """What a partition holds: the first offset and the one after the last."""

    low: int
    end: int


class TopicReader:
    """One topic, open for reading; made by `open_topic`."""

    def __init__(self, topic: str, partitions: int, consumer: AIOKafkaConsumer) -> None:
        self.topic = topic
        self.partitions = range(partitions)
        self._consumer = consumer

    async def bounds(self, partitions: Sequence[int]) -> dict[int, PartitionBounds]:
        places = [TopicPartition(self.topic, number) for number in partitions]
        with self._mapped_errors():
            low = await self._consumer.beginning_offsets(places)
            end = await self._consumer.end_offsets(places)
        return {place.partition: PartitionBounds(low[place], end[place]) for place in places}

    async def ends(self, partitions: Sequence[int]) -> dict[int, int]:
        """The offset after the last record of each partition."""
        places = [TopicPartition(self.topic, number) for number in partitions]
        with self._mapped_errors():
            found = await self._consumer.end_offsets(places)
        return {place.partition: found[place] for place in places}

    async def offsets_at(self, time: datetime, partitions: Sequence[int]) -> dict[int, int]:
        """The first offset of each partition that was written at `time` or later."""
        stamp = int(time.timestamp() * 1000)
        places = {TopicPartition(self.topic, number): stamp for number in partitions}
        with self._mapped_errors():
            found = await self._consumer.offsets_for_times(places)
        bounds = await self.bounds(partitions)
        return {
            place.partition: at.offset if at else bounds[place.partition].end
            for place, at in found.items()
        }

    def partition_of(self, key: str) -> int:
        """Where every client of ours puts the records of a key."""
        return int((murmur2(key.encode()) & 0x7FFFFFFF) % len(self.partitions))

    async def read(
        self,
        starts: Mapping[int, int],
        ends: Mapping[int, int] | None = None,
        moved: Callable[[dict[int, int]], None] | None = None,
    ) -> AsyncIterator[ConsumerRecord]:
        """Records from `starts` on, up to `ends`; without these, for ever. After each batch, `moved`
        is told the positions: they may pass the last record, over transaction markers."""
        places = [TopicPartition(self.topic, number) for number in starts]
        self._consumer.assign(places)
        for place in places:
            self._consumer.seek(place, starts[place.partition])
        while ends is None or not await self._is_over(ends):
            with self._mapped_errors():
                batches = await self._consumer.getmany(timeout_ms=200)
            for batch in batches.values():
                for record in batch:
                    if ends is None or record.offset < ends[record.partition]:
                        yield record
            if moved is not None:
                moved({p.partition: await self._consumer.position(p) for p in places})

    async def read_all(self) -> AsyncIterator[ConsumerRecord]:
        """Everything that the topic holds at this moment."""
        bounds = await self.bounds(self.partitions)
        starts = {number: found.low for number, found in bounds.items()}
        ends = {number: found.end for number, found in bounds.items()}
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
                f"{self.topic} no longer holds, or does not yet hold, that offset: {error}"
            ) from error
        except KafkaError as error:
            raise BrokerUnavailable(f"the brokers of {self.topic} went away: {error}") from error


@asynccontextmanager
async def open_topic(
    connection: Connection, topic: str, poll_ms: int = 500
) -> AsyncIterator[TopicReader]:
    """Opens one of our topics, named without the prefix. `poll_ms` is how long a broker may keep a
    request for records that it does not have."""
    name = connection.topic_name(topic)
    found = await asyncio.to_thread(find_topics, connection)
    if topic not in found:
        raise TopicMismatch(
            f"topic {name} does not exist at {connection.bootstrap}; "
            "`steplog topics list` says which do"
        )
    consumer = AIOKafkaConsumer(
        **connection.aiokafka(
            isolation_level="read_committed",
            auto_offset_reset="none",
            enable_auto_commit=False,
            max_partition_fetch_bytes=MAX_MESSAGE_BYTES,
            fetch_max_wait_ms=poll_ms,
            # It waits so long whenever it asks for a topic first: most of what a small reading takes.
            retry_backoff_ms=20,
        )
    )
    reader = TopicReader(name, found[topic].partitions, consumer)
    try:
        await consumer.start()
        await asyncio.sleep(0)  # aiokafka cannot stop tasks that have not begun
        yield reader
    except KafkaError as error:
        raise BrokerUnavailable(f"{connection.bootstrap} went away: {error}") from error
    finally:
        await consumer.stop()


def read_bounds(connection: Connection, topic: str) -> dict[int, PartitionBounds]:
    """What all partitions of a topic hold at this moment."""

    async def ask() -> dict[int, PartitionBounds]:
        async with open_topic(connection, topic) as reader:
            return await reader.bounds(reader.partitions)

    return asyncio.run(ask())


async def read_records(connection: Connection, topic: str, codec: Codec) -> list[Record]:
    """All of a topic that is small enough to be read as a whole, such as the ledger."""
    async with open_topic(connection, topic) as reader:
        messages = [message async for message in reader.read_all()]
    return [codec.decode(m.value) for m in messages if m.value is not None]
