"""Encoding and producing with acknowledgements, compared with the raw client and the same bytes."""

import asyncio

from confluent_kafka import Producer as ConfluentProducer

from bench.log.steps import StepFactory, key
from bench.measure import compare, show
from pool import topics
from pool.connection import Connection
from pool.producers.output import producer_options
from pool.producers.producer import Producer
from pool.topics import STEPS
from schemas import Record

GROUPS = 600
IN_FLIGHT = 1_000


def run(connection: Connection) -> None:
    topics.create(connection, partitions=4)
    records = list(StepFactory(512, 256).records(GROUPS))
    values = [(key(record), connection.codec().encode(record)) for record in records]
    raw, ours = compare(
        lambda: produce_raw(connection, values),
        lambda: asyncio.run(produce_ours(connection, records)),
    )
    show(
        f"Produce {len(records):,} records: Steps of 512 + 256 tokens and their Ends, acks=all, zstd",
        {"raw confluent-kafka, already encoded": raw, "pool.Producer, encoding included": ours},
        "target: at least 0.50 of raw",
    )


def produce_raw(connection: Connection, values: list[tuple[str, bytes]]) -> int:
    producer = ConfluentProducer(producer_options(connection))
    acknowledged = 0

    def delivered(error: object, _: object) -> None:
        nonlocal acknowledged
        assert error is None
        acknowledged += 1

    topic = connection.topic_name(STEPS)
    for uid, value in values:
        producer.produce(topic, value, uid, on_delivery=delivered)
        producer.poll(0)
    producer.flush()
    return acknowledged


async def produce_ours(connection: Connection, records: list[Record]) -> int:
    async with Producer(connection, connection.codec()) as producer:
        remaining = iter(records)

        async def agent() -> int:
            sent = 0
            for record in remaining:
                await producer.send(STEPS, key(record), record)
                sent += 1
            return sent

        return sum(await asyncio.gather(*(agent() for _ in range(IN_FLIGHT))))
