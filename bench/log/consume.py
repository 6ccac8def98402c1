"""Reading, decoding and assembling into groups, compared with the raw client reading the same bytes."""

import time
import uuid

from confluent_kafka import Consumer, TopicPartition

from bench.measure import compare, show
from pool.connection import Connection
from pool.consumers.consumer import BATCH, StatefulConsumer, consumer_options
from pool.core.group_assembler import GroupAssembler
from pool.core.groups import Group, UngroupedTrajectory
from pool.core.progress import Received
from pool.core.trajectories import StrayRecord
from pool.topics import STEPS, find_topics

COMMIT_EVERY = 0.1
"""Seconds between two transactions, as in a service."""


def run(connection: Connection) -> None:
    raw, decoded, assembled, consumed = compare(
        lambda: read_raw(connection),
        lambda: read_and_decode(connection),
        lambda: assemble(connection),
        lambda: consume(connection),
    )
    show(
        f"Read {raw.records:,} records from {find_topics(connection)[STEPS].partitions} partitions",
        {
            "raw confluent-kafka": raw,
            "decode into typed records": decoded,
            "decode and assemble into groups": assembled,
            "the same by StatefulConsumer, joining included": consumed,
        },
        "target: groups at 10,000 Steps/s per core or 0.15 of raw, whichever is higher",
    )


def open_consumer(connection: Connection) -> tuple[Consumer, int]:
    """A consumer of all records that the topic holds now, and their number."""
    consumer = Consumer(consumer_options(connection, "bench"))
    topic = connection.topic_name(STEPS)
    partitions = [
        TopicPartition(topic, n, 0) for n in range(find_topics(connection)[STEPS].partitions)
    ]
    consumer.assign(partitions)
    return consumer, sum(consumer.get_watermark_offsets(partition)[1] for partition in partitions)


def read_raw(connection: Connection) -> int:
    consumer, count = open_consumer(connection)
    remaining = count
    while remaining:
        remaining -= len(consumer.consume(BATCH, 1.0))
    consumer.close()
    return count


def read_and_decode(connection: Connection) -> int:
    consumer, count = open_consumer(connection)
    codec = connection.codec()
    remaining = count
    while remaining:
        for message in consumer.consume(BATCH, 1.0):
            codec.decode(message.value())
            remaining -= 1
    consumer.close()
    return count


def assemble(connection: Connection) -> int:
    consumer, count = open_consumer(connection)
    codec = connection.codec()
    assemblers = {n: GroupAssembler() for n in range(find_topics(connection)[STEPS].partitions)}
    remaining = count
    while remaining:
        for message in consumer.consume(BATCH, 1.0):
            partition, offset = message.partition() or 0, message.offset() or 0
            item = assemblers[partition].feed(
                Received(codec.decode(message.value()), partition, offset)
            )
            if isinstance(item, Group):
                assemblers[partition].decide(item, offset)
            remaining -= 1
    consumer.close()
    return count


def consume(connection: Connection) -> int:
    _, count = open_consumer(connection)
    assemblers: dict[int, GroupAssembler] = {}

    def assembler(partition: int) -> GroupAssembler:
        return assemblers.setdefault(partition, GroupAssembler())

    name = f"bench-{uuid.uuid4().hex[:8]}"
    consumer: StatefulConsumer[Group | UngroupedTrajectory | StrayRecord] = StatefulConsumer(
        connection,
        topic=STEPS,
        group=name,
        transactional_id=name,
        assembler=assembler,
        codec=connection.codec(),
    )
    with consumer:
        committed_at = time.monotonic()
        while sum(at.committed for at in consumer.offsets()) < count:
            for work in consumer.poll():
                if isinstance(work.item, Group):
                    assemblers[work.assignment.partition].decide(work.item, work.offset)
                consumer.finish([work], ())
            if time.monotonic() - committed_at > COMMIT_EVERY:
                consumer.commit()
                committed_at = time.monotonic()
    return count
