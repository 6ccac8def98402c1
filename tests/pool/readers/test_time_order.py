"""A topic has one order, whoever reads it and from wherever."""

import random

import pytest
from confluent_kafka import Message
from confluent_kafka import Producer as ConfluentProducer

from pool import topics
from pool.connection import Connection
from pool.producers.output import producer_options
from pool.readers import time_order
from pool.readers.scan import OffsetRange, Scan
from pool.readers.time_order import merge_by_time
from pool.topics import STEPS

pytestmark = pytest.mark.broker

PARTITIONS = 3


def place(message: Message) -> tuple[int, int]:
    return message.partition() or 0, message.offset() or 0


def read(connection: Connection, spans: dict[int, OffsetRange]) -> list[tuple[int, int]]:
    with Scan(connection, STEPS, spans) as scan:
        return [place(message) for message in merge_by_time(scan)]


def test_messages_come_in_the_order_in_which_they_were_written(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.create(connection, partitions=PARTITIONS)
    chance = random.Random(1)
    producer = ConfluentProducer(producer_options(connection))
    written: list[tuple[int, int]] = []
    ends = dict.fromkeys(range(PARTITIONS), 0)
    for number in range(600):
        # One partition is silent for a long time, and many messages have the same time.
        partition = chance.choice([0, 1] if number < 400 else [0, 1, 2])
        time = 1_000_000 + number // 5
        name = connection.topic_name(STEPS)
        producer.produce(name, b"x" * 1000, partition=partition, timestamp=time)
        written.append((partition, ends[partition]))
        ends[partition] += 1
    producer.flush(30)
    spans = {number: OffsetRange(0, end) for number, end in ends.items()}
    found = read(connection, spans)
    times = {at: number // 5 for number, at in enumerate(written)}
    assert sorted(found) == sorted(written)
    assert [times[at] for at in found] == sorted(times.values())
    monkeypatch.setattr(time_order, "MAX_BUFFER_BYTES", 2_000)  # fetching pauses all the time
    assert read(connection, spans) == found
    for cut in (1, 250, 599):
        here = {
            number: OffsetRange(sum(partition == number for partition, _ in found[:cut]), end)
            for number, end in ends.items()
        }
        assert read(connection, here) == found[cut:]
