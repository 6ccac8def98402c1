"""What is written is what a rebuild finds, also when records must be sent again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import pytest

from gateway.atropos import log as log_module
from gateway.atropos.events import Began, Env, Joined, Registered, Training
from gateway.atropos.log import Log
from gateway.atropos.neighbours import Neighbours
from gateway.atropos.rebuild import Rebuild
from gateway.atropos.retries import Retries
from gateway.atropos.state import State
from pool import topics
from pool.connection import Connection
from pool.producers import batch_producer as convoys
from pool.producers.batch_producer import Convoys
from pool.readers.reader import open_topic
from pool.topics import ATROPOS, REWARDED
from schemas import Codec
from tests.gateway.atropos import running

pytestmark = pytest.mark.broker

RUN = "default"
TRAINING = msgspec.convert(running.TRAINING, Training)
ENV = Env(max_context_len=512, weight=1.0, desired_name="maths", group_size=4)


class Life(NamedTuple):
    state: State
    log: Log


@pytest.fixture
def connection_with_topics(connection: Connection) -> Connection:
    topics.create(connection, partitions=3)
    return connection


@asynccontextmanager
async def life(connection: Connection, **options: Any) -> AsyncIterator[Life]:
    codec = Codec()
    async with (
        Convoys(connection, codec, **options) as producer,
        open_topic(connection, ATROPOS) as events,
        open_topic(connection, REWARDED) as rewarded,
    ):
        rebuilt = await Rebuild(events, rewarded, producer, codec, RUN).run("owner")
        retries, neighbours = Retries(), Neighbours(len(rewarded.partitions))
        written = Log(producer, RUN, "owner", rebuilt.state, retries, neighbours)
        await written.write_snapshot()
        yield Life(rebuilt.state, written)


def fields(name: str) -> dict[str, Any]:
    row = [b"\1\0\0\0"]
    return {"group_uid": name, "prompt_uid": "p", "tokens": row, "masks": row, "scores": [1.0]}


async def test_a_snapshot_that_is_sent_again_hides_no_event(
    connection_with_topics: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first try is refused, while an event waits behind it that would go before it then."""
    monkeypatch.setattr(convoys, "LARGEST", 2)
    async with life(connection_with_topics, queue_buffering_max_messages=1) as (_, written):
        await written.happen(Registered(training=TRAINING), lambda: None)
        await written.happen(Began(), lambda: None)
        await asyncio.gather(
            written.assemble(fields("leaves alone")),
            written.assemble(fields("takes the room")),
            written.write_snapshot(),
            written.happen(Joined(env=ENV), lambda: None),
        )
    async with life(connection_with_topics) as (state, _):
        assert [env.desired_name for env in state.envs] == ["maths"]
        assert len(state.queue) == 2


async def test_a_group_that_lies_before_an_older_one_is_not_left_behind_by_a_snapshot(
    connection_with_topics: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older one is refused twice, so the younger one is written first; the event between them
    brings a snapshot that has the older one only."""
    monkeypatch.setattr(convoys, "LARGEST", 3)
    monkeypatch.setattr(log_module, "SNAPSHOT_EVERY", 5)
    async with life(connection_with_topics, queue_buffering_max_messages=2) as (_, written):
        await written.happen(Registered(training=TRAINING), lambda: None)
        await asyncio.gather(
            *(written.happen(Began(), lambda: None) for _ in range(3)),
            written.assemble(fields("older")),
            written.happen(Joined(env=ENV), lambda: None),
            written.assemble(fields("younger")),
        )
    async with life(connection_with_topics) as (state, _):
        places = {group.record.group_uid: group.place.offset for group in state.queue}
        assert places == {"younger": 0, "older": 1}
