"""A follower has seen everything that was written before it was asked, or says why not."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer as ConfluentProducer

from pool import topics
from pool.connection import Connection
from pool.producers.output import producer_options
from pool.producers.producer import Producer
from pool.readers.follower import Follower
from pool.topics import STEPS
from schemas import Codec, Position, Record
from servicekit.errors import BrokerUnavailable, TopicMismatch
from steplog.kafka import local_kafka
from tests.conftest import free_port, pause_and_wait
from tests.pool.records import step

pytestmark = pytest.mark.broker

CODEC = Codec()
LIMIT = 60.0
PARTITIONS = 3


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=PARTITIONS)
    return connection


class Seen:
    """What a follower has applied."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def __call__(self, record: Record) -> None:
        step_id: str = record.step_id  # type: ignore[attr-defined]
        if step_id == "poison":
            raise ValueError("this one cannot be applied")
        self.ids.append(step_id)


@asynccontextmanager
async def following(log: Connection, seen: Seen) -> AsyncIterator[Follower]:
    async with Follower(log, STEPS, CODEC, seen) as follower:
        yield follower


async def write(producer: Producer, *step_ids: str) -> list[Position]:
    sends = [producer.send(STEPS, step_id, step(step_id)) for step_id in step_ids]
    return list(await asyncio.gather(*sends))


async def test_what_the_topic_held_is_applied_on_entry(log: Connection) -> None:
    seen = Seen()
    async with Producer(log, CODEC) as producer:
        await write(producer, *(f"s{n}" for n in range(20)))
    async with following(log, seen):
        assert sorted(seen.ids) == sorted(f"s{n}" for n in range(20))


async def test_an_empty_topic_is_followed(log: Connection) -> None:
    async with asyncio.timeout(LIMIT), following(log, seen := Seen()) as follower:
        await follower.sync()
        assert seen.ids == []


async def test_sync_sees_what_another_producer_wrote_just_before(log: Connection) -> None:
    seen = Seen()
    async with Producer(log, CODEC) as producer, following(log, seen) as follower:
        for n in range(20):
            await write(producer, f"s{n}")
            await follower.sync()
            assert seen.ids[-1] == f"s{n}"


async def test_records_of_a_partition_are_applied_in_their_order(log: Connection) -> None:
    seen = Seen()
    async with Producer(log, CODEC) as producer, following(log, seen) as follower:
        for n in range(10):
            await producer.send(STEPS, "one key", step(f"s{n}"))
        await follower.sync()
    assert seen.ids == [f"s{n}" for n in range(10)]


async def test_many_who_ask_at_once_are_all_answered(log: Connection) -> None:
    seen = Seen()
    async with Producer(log, CODEC) as producer, following(log, seen) as follower:

        async def write_and_look(name: str) -> bool:
            await write(producer, name)
            await follower.sync()
            return name in seen.ids

        async with asyncio.timeout(LIMIT):
            assert all(await asyncio.gather(*(write_and_look(f"s{n}") for n in range(200))))


async def test_one_who_stops_waiting_does_not_stop_the_others(log: Connection) -> None:
    async with following(log, Seen()) as follower:
        first, second = (asyncio.create_task(follower.sync()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        async with asyncio.timeout(LIMIT):
            await second
        assert first.cancelled() or first.done()


async def test_a_follower_waits_for_what_lies_before_our_own_record(log: Connection) -> None:
    seen = Seen()
    async with Producer(log, CODEC) as producer, following(log, seen) as follower:
        for n in range(20):
            await producer.send(STEPS, "key", step(f"other-{n}"))
            own = await producer.send(STEPS, "key", step(f"own-{n}"))
            async with asyncio.timeout(LIMIT):
                await follower.wait_until_seen(own)
            assert f"other-{n}" in seen.ids


async def test_markers_of_transactions_at_the_end_do_not_hang_it(log: Connection) -> None:
    """They take offsets, and nobody reads them."""
    writer = ConfluentProducer(producer_options(log, transactional_id=log.topic_prefix))
    await asyncio.to_thread(writer.init_transactions, 30)
    seen = Seen()
    async with following(log, seen) as follower:
        for outcome in (writer.commit_transaction, writer.abort_transaction):
            writer.begin_transaction()
            value = CODEC.encode(step(outcome.__name__), log.topic_name(STEPS))
            writer.produce(log.topic_name(STEPS), value, "key")
            await asyncio.to_thread(writer.flush, 30)
            await asyncio.to_thread(outcome, 30)
            async with asyncio.timeout(LIMIT):
                await follower.sync()
    assert seen.ids == ["commit_transaction"]
    async with asyncio.timeout(LIMIT), following(log, again := Seen()):
        assert again.ids == seen.ids


async def test_a_record_that_cannot_be_read_is_passed_over(
    log: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()
    writer = ConfluentProducer(producer_options(log))
    async with Producer(log, CODEC) as producer, following(log, seen) as follower:
        for value in (b"garbage", None):
            writer.produce(log.topic_name(STEPS), value, "key")
        await asyncio.to_thread(writer.flush, 30)
        await write(producer, "good")
        async with asyncio.timeout(LIMIT):
            await follower.sync()
    assert seen.ids == ["good"]
    assert [record.levelname for record in caplog.records if "cannot be read" in record.message]


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[local_kafka.Broker]:
    yield local_kafka.start(tmp_path, free_port())
    local_kafka.stop(tmp_path)


async def test_it_survives_a_broker_that_pauses(own_broker: local_kafka.Broker) -> None:
    log = Connection(bootstrap=own_broker.bootstrap)
    topics.create(log, partitions=PARTITIONS)
    seen = Seen()
    async with Producer(log, CODEC) as producer, following(log, seen) as follower:
        await write(producer, "before")
        pause_and_wait(own_broker.pid)
        try:
            waiting = asyncio.create_task(follower.sync())
            done, _ = await asyncio.wait([waiting], timeout=1.5)
            assert not done
        finally:
            os.kill(own_broker.pid, signal.SIGCONT)
        async with asyncio.timeout(LIMIT):
            await waiting
            assert seen.ids == ["before"]
            await write(producer, "after")
            await follower.sync()
    assert seen.ids == ["before", "after"]


async def test_a_failure_is_raised_to_those_who_wait_and_to_those_who_come_later(
    log: Connection,
) -> None:
    async with Producer(log, CODEC) as producer, following(log, Seen()) as follower:
        ended = asyncio.create_task(follower.wait_for_failure())
        await write(producer, "poison")
        async with asyncio.timeout(LIMIT):
            for waiting in (follower.sync, lambda: ended, follower.sync):
                with pytest.raises(ValueError, match="cannot be applied"):
                    await waiting()


async def test_a_failure_while_the_topic_is_read_first_is_raised_on_entry(log: Connection) -> None:
    async with Producer(log, CODEC) as producer:
        await write(producer, "poison")
    async with asyncio.timeout(LIMIT):
        with pytest.raises(ValueError, match="cannot be applied"):
            async with following(log, Seen()):
                pass


async def test_a_topic_that_is_not_there_is_told(connection: Connection) -> None:
    async with asyncio.timeout(LIMIT):
        with pytest.raises(TopicMismatch):
            async with following(connection, Seen()):
                pass


async def test_after_its_end_nobody_waits_for_ever(log: Connection) -> None:
    async with following(log, Seen()) as follower:
        pass
    async with asyncio.timeout(LIMIT):
        with pytest.raises(BrokerUnavailable):
            await follower.sync()
