"""What leaves in convoys arrives once and in order, and nobody waits for ever."""

import asyncio

import pytest

from pool import topics
from pool.connection import Connection
from pool.convoys import LARGEST, Convoys
from pool.errors import Fatal
from pool.reader import open_topic
from pool.topics import REWARDED
from schemas import Codec, Position
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
    async with Convoys(log, CODEC, linger_ms=1) as producer:
        places = await asyncio.gather(*send_all(producer))
    assert places == [
        Position(partition=places[0].partition, offset=offset) for offset in range(MANY)
    ]
    async with open_topic(log, REWARDED) as reader:
        ends = await reader.ends(reader.partitions)
        starts = dict.fromkeys(reader.partitions, 0)
        written = [CODEC.decode(m.value) async for m in reader.read(starts, ends)]
    assert written == [step(str(index), index=index) for index in range(MANY)]


async def test_a_record_that_finds_no_convoy_under_way_leaves_however_late_it_is(
    log: Connection,
) -> None:
    """No time to board at all is what a process has that is kept from running for a moment."""
    producer = Convoys(log, CODEC, linger_ms=0)
    async with asyncio.timeout(30):
        for number in range(3):
            await producer.send(REWARDED, "p", step(str(number)))
    await producer.close()


async def test_those_that_wait_for_a_convoy_are_sent_before_the_producer_closes(
    log: Connection,
) -> None:
    producer = Convoys(log, CODEC, linger_ms=1)
    sending = send_all(producer)
    await asyncio.sleep(0)  # they begin
    await producer.close()
    assert len(await asyncio.gather(*sending)) == MANY
    with pytest.raises(Fatal):
        await producer.send(REWARDED, "p", step("late"))


async def test_one_that_is_cancelled_while_it_waits_holds_nobody_up(log: Connection) -> None:
    async with Convoys(log, CODEC, linger_ms=1) as producer:
        sending = send_all(producer)
        await asyncio.sleep(0)  # they begin
        sending[-2].cancel()
        answers = await asyncio.gather(*sending, return_exceptions=True)
        assert isinstance(answers[-2], asyncio.CancelledError)
        assert all(isinstance(one, Position) for one in answers[:-2] + answers[-1:])
