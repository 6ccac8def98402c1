"""What leaves in convoys arrives once and in order, and nobody waits for ever."""

import asyncio

import pytest

from pool import topics
from pool.connection import Connection
from pool.producers import batch_producer as convoys
from pool.producers.batch_producer import LARGEST, Convoys
from pool.readers.reader import open_topic
from pool.topics import REWARDED
from schemas import Codec, Position
from servicekit.errors import BrokerUnavailable, Fatal
from tests.pool.records import step

pytestmark = pytest.mark.broker

CODEC = Codec()
MANY = 3 * LARGEST + 1


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=3)
    return connection


def send_all(producer: Convoys) -> list["asyncio.Task[Position]"]:
    """Each waits for its own, all at once."""
    return [
        asyncio.create_task(producer.send(REWARDED, "p", step(str(index), index=index)))
        for index in range(MANY)
    ]


async def test_records_that_come_together_are_in_the_log_in_their_order(log: Connection) -> None:
    async with Convoys(log, CODEC) as producer:
        places = await asyncio.gather(*send_all(producer))
    assert places == [
        Position(partition=places[0].partition, offset=offset) for offset in range(MANY)
    ]
    async with open_topic(log, REWARDED) as reader:
        ends = await reader.ends(reader.partitions)
        starts = dict.fromkeys(reader.partitions, 0)
        written = [CODEC.decode(m.value) async for m in reader.read(starts, ends)]
    assert written == [step(str(index), index=index) for index in range(MANY)]


async def test_one_who_sends_alone_waits_for_nobody(
    log: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convoys, "BOARDING_S", 3600.0)
    async with asyncio.timeout(30), Convoys(log, CODEC) as producer:
        for number in range(3):
            await producer.send(REWARDED, "p", step(str(number)))


async def test_a_convoy_does_not_wait_long_for_those_who_do_not_send_again(
    log: Connection,
) -> None:
    async with asyncio.timeout(30), Convoys(log, CODEC) as producer:
        await asyncio.gather(*send_all(producer))
        for number in range(3):
            await producer.send(REWARDED, "p", step(f"alone {number}"))


async def test_records_that_the_client_refuses_fail_and_hold_nobody_up(log: Connection) -> None:
    room = LARGEST // 2
    async with (
        asyncio.timeout(30),
        Convoys(log, CODEC, queue_buffering_max_messages=room) as producer,
    ):
        answers = await asyncio.gather(*send_all(producer), return_exceptions=True)
        refused = [one for one in answers if isinstance(one, BrokerUnavailable)]
        assert refused
        assert sum(isinstance(one, Position) for one in answers) == MANY - len(refused) >= room
        await producer.send(REWARDED, "p", step("later"))


async def test_those_that_wait_for_a_convoy_are_sent_before_the_producer_closes(
    log: Connection,
) -> None:
    producer = Convoys(log, CODEC)
    sending = send_all(producer)
    await asyncio.sleep(0)  # they begin
    await producer.close()
    assert len(await asyncio.gather(*sending)) == MANY
    with pytest.raises(Fatal):
        await producer.send(REWARDED, "p", step("late"))


async def test_one_that_is_cancelled_while_it_waits_holds_nobody_up(log: Connection) -> None:
    async with Convoys(log, CODEC) as producer:
        sending = send_all(producer)
        await asyncio.sleep(0)  # they begin
        sending[-2].cancel()
        answers = await asyncio.gather(*sending, return_exceptions=True)
        assert isinstance(answers[-2], asyncio.CancelledError)
        assert all(isinstance(one, Position) for one in answers[:-2] + answers[-1:])


async def test_one_that_is_cancelled_does_not_keep_the_producer_from_closing(
    log: Connection,
) -> None:
    producer = Convoys(log, CODEC)
    sending = [
        asyncio.create_task(producer.send(REWARDED, "p", step(name)))
        for name in ("first", "second")
    ]
    await asyncio.sleep(0)  # the first one leaves, and the second one waits
    sending[1].cancel()
    async with asyncio.timeout(30):
        await producer.close()
    assert isinstance(await sending[0], Position)
