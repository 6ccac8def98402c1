"""Memory depends on open state only: reading a million Steps of closed groups keeps it flat."""

import asyncio
from collections.abc import Iterator

import psutil

from bench.log.consume import open_consumer
from bench.log.steps import GROUP_SIZE, STEPS_EACH, StepFactory, key
from pool import topics
from pool.connection import Connection
from pool.consumers.consumer import BATCH
from pool.core.group_assembler import GroupAssembler
from pool.core.groups import Group
from pool.core.progress import Received
from pool.producers.producer import Producer
from pool.topics import STEPS

TOTAL_STEPS = 1_000_000
GROUPS = TOTAL_STEPS // (GROUP_SIZE * STEPS_EACH)
LINES = 10


def run(connection: Connection) -> None:
    topics.create(connection, partitions=4)
    asyncio.run(fill(connection))
    print(
        f"\nRead {TOTAL_STEPS:,} closed Steps of 8 + 8 tokens through one assembler per partition"
    )
    for read, resident in read_through(connection):
        print(f"  {read:>10,} records   {resident / 2**20:>7.1f} MiB resident")
    print("  target: flat")


async def fill(connection: Connection) -> None:
    records = iter(StepFactory(8, 8).records(GROUPS))
    async with Producer(connection, connection.codec()) as producer:

        async def agent() -> None:
            for record in records:
                await producer.send(STEPS, key(record), record)

        await asyncio.gather(*(agent() for _ in range(2_000)))


def read_through(connection: Connection) -> Iterator[tuple[int, int]]:
    consumer, count = open_consumer(connection)
    codec, process = connection.codec(), psutil.Process()
    assemblers: dict[int, GroupAssembler] = {}
    read, next_line = 0, count // LINES
    while read < count:
        for message in consumer.consume(BATCH, 1.0):
            partition, offset = message.partition() or 0, message.offset() or 0
            assembler = assemblers.setdefault(partition, GroupAssembler())
            item = assembler.feed(Received(codec.decode(message.value()), partition, offset))
            if isinstance(item, Group):
                assembler.decide(item, offset)
            read += 1
        if read >= next_line:
            next_line += count // LINES
            yield read, process.memory_info().rss
    consumer.close()
