"""Readers see committed records only, know where a topic ends, and give prompts in full."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import Producer as ConfluentProducer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import TopicPartition

from pool import topics
from pool.connection import Connection
from pool.core.prompts import BrokenPrompt
from pool.producers.output import producer_options
from pool.producers.producer import Producer
from pool.readers import prompt_history
from pool.readers.end_offsets import wait_until_readable
from pool.readers.prompt_history import PromptHistory, open_prompt_history
from pool.readers.reader import PartitionBounds, open_topic
from pool.topics import REWARDED, STEPS
from schemas import Codec, Step
from schemas.packing import unpack_ids
from servicekit.errors import BrokerUnavailable, OffsetLost, TopicMismatch
from tests.conftest import free_port
from tests.pool.records import step
from tests.pool.topic_content import content, conversation

pytestmark = pytest.mark.broker

CODEC = Codec()


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=1)
    return connection


class Transactions:
    """Writes one record after the other in transactions, to partition 0."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._topic = connection.topic_name(STEPS)
        self._producer = ConfluentProducer(
            producer_options(connection, transactional_id=connection.topic_prefix)
        )
        self._producer.init_transactions(30)

    def write(self, *values: str) -> None:
        for value in values:
            self._producer.produce(self._topic, value, partition=0)
        self._producer.flush(30)

    @contextmanager
    def committed(self) -> Iterator[None]:
        self._producer.begin_transaction()
        yield
        self._producer.commit_transaction(30)
        wait_until_readable(self._connection, STEPS)

    @contextmanager
    def aborted(self) -> Iterator[None]:
        self._producer.begin_transaction()
        yield
        self._producer.abort_transaction(30)
        wait_until_readable(self._connection, STEPS)


async def values(connection: Connection) -> list[bytes]:
    return [record.value for record in await content(connection, STEPS)]


async def write(connection: Connection, steps: Sequence[Step]) -> None:
    async with Producer(connection, CODEC) as producer:
        await asyncio.gather(*(producer.send(STEPS, one.prompt_uid, one) for one in steps))


async def test_reading_ends_behind_the_marker_of_a_committed_transaction(log: Connection) -> None:
    transactions = Transactions(log)
    with transactions.committed():
        transactions.write("a", "b")
    async with open_topic(log, STEPS) as reader:
        assert await reader.bounds([0]) == {0: PartitionBounds(0, 3)}
    async with asyncio.timeout(20):
        assert await values(log) == [b"a", b"b"]


async def test_aborted_records_are_never_seen(log: Connection) -> None:
    transactions = Transactions(log)
    with transactions.committed():
        transactions.write("a")
    with transactions.aborted():
        transactions.write("never", "never")
    with transactions.committed():
        transactions.write("b")
    with transactions.aborted():
        transactions.write("never")
    async with asyncio.timeout(20):
        assert await values(log) == [b"a", b"b"]


async def test_an_open_transaction_holds_no_reader_up(log: Connection) -> None:
    transactions = Transactions(log)
    with transactions.committed():
        transactions.write("a")
    with transactions.committed():
        transactions.write("open")
        async with open_topic(log, STEPS) as reader:
            assert await reader.bounds([0]) == {0: PartitionBounds(0, 2)}
        async with asyncio.timeout(20):
            assert await values(log) == [b"a"]
    assert await values(log) == [b"a", b"open"]


async def test_reading_keeps_to_its_bounds(log: Connection) -> None:
    await write(log, [step(f"s{number}") for number in range(10)])
    async with open_topic(log, STEPS) as reader:
        offsets = [record.offset async for record in reader.read({0: 3}, {0: 7})]
        assert offsets == [3, 4, 5, 6]
        assert [record.offset async for record in reader.read({0: 10}, {0: 10})] == []


async def test_every_partition_is_read_from_its_start_to_its_end(connection: Connection) -> None:
    topics.create(connection, partitions=4)
    await write(connection, [step(f"s{n}", prompt=f"p{n}") for n in range(100)])
    found = await content(connection, STEPS)
    assert {record.key for record in found} == {f"p{n}".encode() for n in range(100)}
    for partition in range(4):
        offsets = [record.offset for record in found if record.partition == partition]
        assert offsets == list(range(len(offsets)))
    assert await content(connection, REWARDED) == []


async def test_reading_without_an_end_waits_for_new_records(log: Connection) -> None:
    await write(log, [step("old")])
    async with asyncio.timeout(20), open_topic(log, STEPS) as reader:
        following = reader.read({0: 0})
        assert (await anext(following)).offset == 0
        coming = asyncio.ensure_future(anext(following))
        await write(log, [step("new")])
        assert CODEC.decode((await coming).value) == step("new")


async def test_a_time_is_turned_into_offsets(log: Connection) -> None:
    topic = log.topic_name(STEPS)
    noon = datetime(2024, 1, 1, 12, tzinfo=UTC)
    producer = ConfluentProducer(log.confluent())
    for minute in range(3):
        stamp = int((noon + timedelta(minutes=minute)).timestamp() * 1000)
        producer.produce(topic, b"x", partition=0, timestamp=stamp)
    producer.flush(30)
    async with open_topic(log, STEPS) as reader:
        for minutes, offset in [(-60, 0), (0, 0), (0.5, 1), (2, 2), (2.5, 3), (60, 3)]:
            time = noon + timedelta(minutes=minutes)
            assert await reader.offsets_at(time, [0]) == {0: offset}


async def test_an_offset_that_retention_took_is_a_typed_error(log: Connection) -> None:
    await write(log, [step(f"s{number}") for number in range(10)])
    admin = AdminClient(log.confluent())
    gone = admin.delete_records([TopicPartition(log.topic_name(STEPS), 0, 6)])
    for future in gone.values():
        future.result(60)
    with pytest.raises(OffsetLost, match=f"{log.topic_name(STEPS)} no longer has"):
        async with open_topic(log, STEPS) as reader:
            assert await reader.bounds([0]) == {0: PartitionBounds(6, 10)}
            async with asyncio.timeout(20):
                [record async for record in reader.read({0: 2}, {0: 10})]


async def test_a_topic_can_be_closed_as_soon_as_it_is_open(log: Connection) -> None:
    async with open_topic(log, STEPS):
        pass


async def test_a_topic_that_does_not_exist_is_named(connection: Connection) -> None:
    with pytest.raises(TopicMismatch, match=f"Topic {connection.topic_name(STEPS)} does not exist"):
        async with open_topic(connection, STEPS):
            pass


async def test_a_cluster_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "TIMEOUT", 0.5)
    connection = Connection(bootstrap=f"127.0.0.1:{free_port()}")
    with pytest.raises(BrokerUnavailable, match=f"no broker answers at {connection.bootstrap}"):
        async with open_topic(connection, STEPS):
            pass


async def prompt_at(prompts: PromptHistory, steps: Sequence[Step], offset: int) -> list[int]:
    return unpack_ids(await prompts.prompt(steps[offset], 0, offset)).tolist()


async def test_a_prompt_is_full_though_its_parents_lie_far_back(
    log: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_history, "FIRST_LOOK", 2)
    steps, prompts = conversation(40)
    await write(log, steps)
    async with open_prompt_history(log, STEPS, CODEC) as reader:
        assert await prompt_at(reader, steps, 38) == prompts[38]
        assert await prompt_at(reader, steps, 39) == prompts[39]
    for start in (1, 2, 3, 17, 18, 19):
        async with open_prompt_history(log, STEPS, CODEC) as reader:
            assert await prompt_at(reader, steps, start) == prompts[start]


async def test_other_records_between_parent_and_child_do_not_matter(log: Connection) -> None:
    (parent, last), (_, prompt) = conversation(2)
    producer = ConfluentProducer(producer_options(log))
    others = [b"no record", None, CODEC.encode(step("s0", "another trajectory", ids=(9,)))]
    for value in [CODEC.encode(parent), *others, CODEC.encode(last)]:
        producer.produce(log.topic_name(STEPS), value, "p")
    producer.flush(30)
    async with open_prompt_history(log, STEPS, CODEC) as reader:
        assert unpack_ids(await reader.prompt(last, 0, 4)).tolist() == prompt


async def test_a_prompt_without_its_parent_is_broken_and_spoils_no_other(log: Connection) -> None:
    steps, prompts = conversation(5)
    await write(log, [steps[0], steps[1], steps[3], steps[4]])
    async with open_prompt_history(log, STEPS, CODEC) as reader:
        assert unpack_ids(await reader.prompt(steps[1], 0, 1)).tolist() == prompts[1]
        for lost, offset in ((steps[3], 2), (steps[4], 3)):
            with pytest.raises(BrokenPrompt, match=f"{lost.step_id} extends {lost.parent}, which"):
                await reader.prompt(lost, 0, offset)
        assert unpack_ids(await reader.prompt(steps[1], 0, 1)).tolist() == prompts[1]


async def test_memory_of_prompts_is_bounded_and_what_was_forgotten_is_read_again(
    log: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_history, "REMEMBERED", 3)
    steps, prompts = conversation(12)
    await write(log, steps)
    async with open_prompt_history(log, STEPS, CODEC) as reader:
        for offset in (11, 2, 10, 5):
            assert await prompt_at(reader, steps, offset) == prompts[offset]
