"""An awaited send is in the log, once and in order; anything else is a typed error in time."""

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from pool import topics
from pool.connection import MAX_RECORD_BYTES, Connection
from pool.producers import producer as producer_module
from pool.producers.output import producer_options
from pool.producers.producer import Producer
from pool.readers.reader import open_topic
from pool.topics import REWARDED, STEPS
from schemas import Codec, Position, Step
from servicekit.errors import BrokerUnavailable, Fatal, RecordTooLarge, TopicMismatch
from steplog.kafka import local_kafka
from tests.conftest import free_port, kill
from tests.pool.records import step
from tests.pool.topic_content import content

pytestmark = pytest.mark.broker

CODEC = Codec()
LATE = 10.0
"""Seconds after its timeout when a record has failed at last, on a busy machine too: overdue ones are
sought every second. Without its own timeout it would take 30."""


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=3)
    return connection


def nowhere() -> Connection:
    return Connection(bootstrap=f"127.0.0.1:{free_port()}")


def with_queue_of(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def options(connection: Connection, **others: Any) -> dict[str, Any]:
        return producer_options(connection, queue_buffering_max_messages=limit, **others)

    monkeypatch.setattr(producer_module, "producer_options", options)


def filled(size: int) -> Step:
    """A Step that takes so many bytes, which no compression makes less."""
    noise = random.Random(0).randbytes(size)
    over = len(CODEC.encode(step("s", request_hash=noise))) - size
    record = step("s", request_hash=noise[over:])
    assert len(CODEC.encode(record)) == size
    return record


async def step_ids(connection: Connection, topic: str = STEPS) -> list[str]:
    found = [CODEC.decode(record.value) for record in await content(connection, topic)]
    return [record.step_id for record in found if isinstance(record, Step)]


async def test_a_returned_position_is_where_the_broker_has_the_record(log: Connection) -> None:
    record = step("s", metadata='{"ä": 1}')
    async with Producer(log, CODEC) as producer:
        places = [
            await producer.send(STEPS, f"key-{n}", record, [("trace", b"\0\1")]) for n in range(9)
        ]
        # Another client, and before the producer closes: nothing waits in a buffer.
        consumer = Consumer(log.confluent(group_id="none", fetch_wait_max_ms=10))
        for number, place in enumerate(places):
            spot = TopicPartition(log.topic_name(STEPS), place.partition, place.offset)
            consumer.assign([spot])
            message = consumer.poll(60)
            assert message is not None and message.error() is None
            assert (message.key(), message.offset()) == (f"key-{number}".encode(), place.offset)
            assert message.headers() == [("trace", b"\0\1")]
            value = message.value()
            assert isinstance(value, bytes) and CODEC.decode(value) == record
        consumer.close()
    assert len(set(places)) == len(places)
    assert len({place.partition for place in places}) > 1


async def test_records_of_a_key_keep_the_order_in_which_they_were_sent(log: Connection) -> None:
    async with Producer(log, CODEC) as producer:
        sends = [producer.send(STEPS, f"key-{n % 7}", step(f"{n % 7}.{n}")) for n in range(2000)]
        await asyncio.gather(*sends)
    ids = await step_ids(log)
    for key in range(7):
        expected = [f"{key}.{n}" for n in range(2000) if n % 7 == key]
        assert [name for name in ids if name.startswith(f"{key}.")] == expected


async def test_a_full_queue_makes_senders_wait_in_their_order(
    log: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_queue_of(5, monkeypatch)
    async with Producer(log, CODEC) as producer:
        sends = []
        for number in range(3000):
            sends.append(asyncio.create_task(producer.send(STEPS, "key", step(str(number)))))
            if number >= 1000:  # these begin while others wait and room is made
                await sends[0]
                await asyncio.sleep(0)
        await asyncio.gather(*sends)
    assert await step_ids(log) == [str(n) for n in range(3000)]


async def test_a_queue_that_stays_full_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with_queue_of(5, monkeypatch)
    async with Producer(nowhere(), CODEC, timeout=1) as producer:
        started = time.monotonic()
        sends = (producer.send(STEPS, "key", step(str(n))) for n in range(20))
        failures = await asyncio.gather(*sends, return_exceptions=True)
        took = time.monotonic() - started
    assert [type(failure) for failure in failures] == [BrokerUnavailable] * 20
    assert any("queue stayed full for 1 s" in str(failure) for failure in failures)
    assert took < 2 * 1 + LATE


async def test_every_client_puts_a_key_into_the_same_partition(log: Connection) -> None:
    keys = [f"prompt-{number}-ключ" for number in range(200)]
    async with Producer(log, CODEC) as producer, open_topic(log, STEPS) as reader:
        places = await asyncio.gather(*(producer.send(STEPS, key, step("s")) for key in keys))
        assert [place.partition for place in places] == [reader.partition_of(key) for key in keys]
    assert {place.partition for place in places} == {0, 1, 2}


def test_a_producer_is_idempotent_and_waits_for_all_replicas(connection: Connection) -> None:
    options = producer_options(connection)
    assert options["enable.idempotence"] is True
    assert options["acks"] == "all"


async def test_without_a_broker_a_send_waits_and_then_says_so() -> None:
    connection = nowhere()
    async with Producer(connection, CODEC, timeout=1) as producer:
        started = time.monotonic()
        with pytest.raises(BrokerUnavailable, match=f"{connection.bootstrap} .* within 1 s"):
            await producer.send(STEPS, "key", step("s"))
        assert 1 <= time.monotonic() - started < 1 + LATE


async def test_closing_without_a_broker_leaves_no_sender_waiting() -> None:
    producer = Producer(nowhere(), CODEC, timeout=1)
    sends = [asyncio.create_task(producer.send(STEPS, "key", step("s"))) for _ in range(3)]
    await asyncio.sleep(0)  # let them begin
    async with asyncio.timeout(1 + 2 * LATE):
        await producer.close()
        failures = await asyncio.gather(*sends, return_exceptions=True)
    assert [type(failure) for failure in failures] == [BrokerUnavailable] * 3


async def test_closing_waits_for_what_was_sent(log: Connection) -> None:
    producer = Producer(log, CODEC)
    sends = [asyncio.create_task(producer.send(STEPS, "key", step(str(n)))) for n in range(300)]
    await asyncio.sleep(0)
    await producer.close()
    places = await asyncio.gather(*sends)
    assert [place.offset for place in places] == list(range(300))
    with pytest.raises(Fatal, match="The producer is closed"):
        await producer.send(STEPS, "key", step("late"))


async def test_a_cancelled_send_disturbs_no_other(log: Connection) -> None:
    async with Producer(log, CODEC) as producer:
        sends = [asyncio.create_task(producer.send(STEPS, "k", step(str(n)))) for n in range(100)]
        await asyncio.sleep(0)
        for send in sends[::2]:
            send.cancel()
        done = await asyncio.gather(*sends, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in done[::2])
    assert all(isinstance(end, Position) for end in done[1::2])
    ids = await step_ids(log)
    assert {str(n) for n in range(1, 100, 2)} <= set(ids)
    assert len(set(ids)) == len(ids)


async def test_the_largest_record_is_taken_and_read(log: Connection) -> None:
    record = filled(MAX_RECORD_BYTES)
    async with Producer(log, CODEC) as producer:
        await producer.send(STEPS, "key", record)
    (found,) = await content(log, STEPS)
    assert CODEC.decode(found.value) == record


async def test_a_larger_record_is_refused_and_nothing_is_written(log: Connection) -> None:
    async with Producer(log, CODEC) as producer:
        with pytest.raises(RecordTooLarge, match=r"8,388,609 bytes, and the limit is 8,388,608"):
            await producer.send(STEPS, "key", filled(MAX_RECORD_BYTES + 1))
        await producer.send(STEPS, "key", step("next"))
    assert await step_ids(log) == ["next"]


async def test_a_prompt_of_100k_tokens_with_a_response_of_8k(log: Connection) -> None:
    ids = random.Random(0).choices(range(151_936), k=108_000)
    record = step("s", ids=ids[:100_000], response=ids[100_000:])
    async with Producer(log, CODEC) as producer:
        await producer.send(REWARDED, "key", record)
    (found,) = await content(log, REWARDED)
    assert CODEC.decode(found.value) == record


@pytest.mark.slow
async def test_a_broker_that_is_killed_and_comes_back_has_every_record_once(
    tmp_path: Path,
) -> None:
    port = free_port()
    broker = await asyncio.to_thread(local_kafka.start, tmp_path, port)
    connection = Connection(bootstrap=broker.bootstrap)
    sent: list[str] = []
    acknowledged: asyncio.Queue[str] = asyncio.Queue()
    stop = asyncio.Event()

    async def keep_sending(producer: Producer, sender: int) -> None:
        while not stop.is_set():
            name = f"{sender}.{len(sent)}"
            sent.append(name)
            await producer.send(STEPS, f"key-{sender}", step(name))
            acknowledged.put_nowait(name)

    try:
        await asyncio.to_thread(topics.create, connection, 3)
        async with Producer(connection, CODEC, timeout=60) as producer:
            senders = [asyncio.create_task(keep_sending(producer, n)) for n in range(20)]
            for _ in range(2):
                for _ in range(500):
                    await acknowledged.get()
                await asyncio.to_thread(kill, broker)
                broker = await asyncio.to_thread(local_kafka.start, tmp_path, port)
            stop.set()
            await asyncio.gather(*senders)
        assert Counter(await step_ids(connection)) == Counter(sent)
    finally:
        await asyncio.to_thread(local_kafka.stop, tmp_path)


async def test_a_missing_topic_is_named_as_the_reason(connection: Connection) -> None:
    async with Producer(connection, connection.codec()) as producer:
        with pytest.raises(TopicMismatch, match="steplog topics create"):
            await producer.send(STEPS, "p", step("s"))
