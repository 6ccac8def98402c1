"""What is written is what a rebuild finds, also when records must be sent again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from gateway.atropos.log import writer as log_writer
from gateway.atropos.log.prompt_uids import PromptUids
from gateway.atropos.log.rebuild import StateRebuild
from gateway.atropos.log.retries import RetryDetector
from gateway.atropos.log.writer import LogWriter
from gateway.atropos.state.events import (
    Began,
    Env,
    Joined,
    Registered,
    Snapshot,
    Training,
    decode_event,
)
from gateway.atropos.state.state import AtroposState
from pool import topics
from pool.connection import Connection
from pool.producers.output import Output
from pool.producers.producer import Producer
from pool.readers.reader import open_topic
from pool.topics import ATROPOS, REWARDED
from schemas import AtroposEvent, Codec, Position, Record, ScoredGroup
from servicekit.errors import BrokerUnavailable
from tests.gateway.atropos import running

pytestmark = pytest.mark.broker

RUN = "default"
TRAINING = msgspec.convert(running.TRAINING, Training)
ENV = Env(max_context_len=512, weight=1.0, desired_name="maths", group_size=4)


class FailingProducer(Producer):
    """Awaits `fail` before each record is sent; when it returns True, the broker is unavailable."""

    fail: Callable[[Record], Awaitable[bool]] | None = None

    async def deliver(self, output: Output) -> Position:
        if self.fail and await self.fail(self._codec.decode(output.value)):
            raise BrokerUnavailable("not now")
        return await super().deliver(output)


@pytest.fixture
def connection_with_topics(connection: Connection) -> Connection:
    topics.create(connection, partitions=3)
    return connection


@asynccontextmanager
async def opened_log(
    connection: Connection,
) -> AsyncIterator[tuple[AtroposState, LogWriter, FailingProducer]]:
    codec = Codec()
    async with (
        FailingProducer(connection, codec) as producer,
        open_topic(connection, ATROPOS) as events,
        open_topic(connection, REWARDED) as rewarded,
    ):
        rebuilt = await StateRebuild(events, rewarded, producer, codec, RUN).run("owner")
        retries, prompt_uids = RetryDetector(), PromptUids(len(rewarded.partitions))
        log = LogWriter(producer, RUN, "owner", rebuilt.state, retries, prompt_uids, "train")
        await log.write_snapshot()
        yield rebuilt.state, log, producer


def fields(name: str) -> dict[str, Any]:
    row = [b"\1\0\0\0"]
    return {"group_uid": name, "prompt_uid": "p", "tokens": row, "masks": row, "scores": [1.0]}


async def test_a_snapshot_that_is_sent_again_hides_no_event(
    connection_with_topics: Connection,
) -> None:
    """The first attempt fails while an event waits behind it, which must not overtake it."""
    failed = 0

    async def fail(record: Record) -> bool:
        nonlocal failed
        if not isinstance(record, AtroposEvent):
            return False
        fails = isinstance(decode_event(record.event), Snapshot) and not failed
        failed += fails
        await asyncio.sleep(0.1 if fails else 0)
        return fails

    async with opened_log(connection_with_topics) as (_, log, producer):
        await log.append_event(Registered(training=TRAINING), lambda: None)
        await log.append_event(Began(), lambda: None)
        producer.fail = fail
        await asyncio.gather(
            log.append_agent_group(fields("first")),
            log.append_agent_group(fields("second")),
            log.write_snapshot(),
            log.append_event(Joined(env=ENV), lambda: None),
        )
    assert failed == 1
    async with opened_log(connection_with_topics) as (state, _, _):
        assert [env.desired_name for env in state.envs] == ["maths"]
        assert len(state.queue) == 2


async def test_a_group_that_lies_before_an_older_one_is_not_left_behind_by_a_snapshot(
    connection_with_topics: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending the older group fails, so the younger one is written first; the event between them
    triggers a snapshot that contains only the older one."""
    failed = False

    async def fail(record: Record) -> bool:
        nonlocal failed
        if failed or not isinstance(record, ScoredGroup) or record.group_uid != "older":
            return False
        failed = True
        await asyncio.sleep(0.5)  # the younger one is acknowledged
        return True

    monkeypatch.setattr(log_writer, "SNAPSHOT_EVERY", 3)
    async with opened_log(connection_with_topics) as (_, log, producer):
        await log.append_event(Registered(training=TRAINING), lambda: None)
        producer.fail = fail
        await asyncio.gather(
            log.append_event(Began(), lambda: None),
            log.append_agent_group(fields("older")),
            log.append_event(Joined(env=ENV), lambda: None),
            log.append_agent_group(fields("younger")),
        )
    assert failed
    async with opened_log(connection_with_topics) as (state, _, _):
        offsets = {group.record.group_uid: group.position.offset for group in state.queue}
        assert offsets == {"younger": 0, "older": 1}
