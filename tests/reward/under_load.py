"""Agents that write while workers die, and what must be true of `rewarded` afterwards."""

import asyncio
import random
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from confluent_kafka import Consumer, TopicPartition

from pool import topics
from pool.connection import Connection
from pool.consumers.transaction import read_offsets
from pool.core.progress import Received
from pool.core.trajectories import source_position
from pool.producers.producer import Producer
from pool.topics import REWARDED, STEPS
from schemas import Position, Record, Step, TrajectoryEnd
from tests.pool.log import identity, messages, records
from tests.pool.records import end, feedback, step
from tests.reward.running import RunningWorker, wait_for

GROUP = "steplog-reward"
PROMPTS = 40


def some_trajectory(uid: str, prompt: str, chance: random.Random) -> Iterator[Record]:
    """One to four Steps and an End; some have Feedback before it, some after."""
    count = chance.randint(1, 4)
    for index in range(count):
        yield step(f"{uid}-{index}", uid, prompt, index=index)
    if chance.random() < 0.2:
        yield feedback(0.5, uid, prompt)
    yield end(uid, prompt, steps=count, reward_expected=True)
    if chance.random() < 0.2:
        yield feedback(0.75, uid, prompt)


class Load:
    """Writes trajectories in the background, many at once, and knows what was acknowledged."""

    def __init__(self, connection: Connection, rate: float = 40.0, agents: int = 10) -> None:
        self._connection = connection
        self._pause = agents / rate
        self._agents = agents
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._write()))
        self.acknowledged: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()

    def finish(self) -> None:
        self._stop.set()
        self._thread.join()

    async def _write(self) -> None:
        async with Producer(self._connection, self._connection.codec(), timeout=60) as producer:
            await asyncio.gather(*(self._agent(producer, n) for n in range(self._agents)))

    async def _agent(self, producer: Producer, agent: int) -> None:
        chance = random.Random(agent)
        number = 0
        while not self._stop.is_set():
            uid, prompt = f"t{agent}.{number}", f"p{chance.randrange(PROMPTS)}"
            for record in some_trajectory(uid, prompt, chance):
                await producer.send(STEPS, prompt, record)
                self.acknowledged.append(identity(record))
            await asyncio.sleep(chance.uniform(0, 2 * self._pause))
            number += 1


class Committed:
    """Watches the group's offsets: while a partition has an owner they never go back."""

    def __init__(self, connection: Connection) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(connection,))
        self.went_back: list[str] = []
        self.seen = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self, connection: Connection) -> None:
        consumer = Consumer(connection.confluent(group_id=GROUP))
        last: dict[int, int] = {}
        while not self._stop.wait(0.1):
            for place in read_offsets(consumer, places(connection), patience=60):
                if place.offset < last.get(place.partition, place.offset):
                    self.went_back.append(f"{last[place.partition]} → {place.offset}")
                last[place.partition] = place.offset
                self.seen += 1
        consumer.close()


def places(connection: Connection) -> list[TopicPartition]:
    found = topics.find_topics(connection)[STEPS].partitions
    return [TopicPartition(connection.topic_name(STEPS), number) for number in range(found)]


def lag(connection: Connection) -> int:
    """What any Kafka tool shows for the group."""
    consumer = Consumer(connection.confluent(group_id=GROUP))
    committed = read_offsets(consumer, places(connection), patience=30)
    ends = [consumer.get_watermark_offsets(place, timeout=30)[1] for place in committed]
    consumer.close()
    return sum(end - max(0, at.offset) for at, end in zip(committed, ends, strict=True))


def wait_for_assignment(worker: RunningWorker) -> None:
    wait_for(lambda: "Assigned partitions [" in worker.log.read_text(), worker)


def owned(worker: RunningWorker) -> set[int]:
    """The partitions that it has, by what it has said."""
    found: set[int] = set()
    for what, numbers in re.findall(
        r"(Assigned|Gave up) partitions \[([\d, ]+)\]", worker.log.read_text()
    ):
        places = {int(number) for number in numbers.split(",")}
        found = found | places if what == "Assigned" else found - places
    return found


def wait_for_progress(connection: Connection, count: int, worker: RunningWorker) -> None:
    """Until `rewarded` holds that many records more than now."""
    before = len(records(connection, REWARDED))
    wait_for(lambda: len(records(connection, REWARDED)) >= before + count, worker)


def settle(connection: Connection, worker: RunningWorker) -> None:
    """After quiet: nothing is left to read, and all of it is in `rewarded`."""
    wait_for(lambda: lag(connection) == 0, worker)
    wait_for(lambda: not missing(connection), worker)
    assert_rewarded_complete(connection)


def missing(connection: Connection) -> Counter[str]:
    return ids(connection, STEPS) - ids(connection, REWARDED)


def ids(connection: Connection, topic: str) -> Counter[str]:
    return Counter(identity(record) for record in records(connection, topic))


def assert_rewarded_complete(connection: Connection) -> None:
    """I3: each record of `steps` is in `rewarded` once, with its source, in the order of its key."""
    read = {
        identity(record): Position(partition=message.partition, offset=message.offset)
        for message, record in decoded(connection, STEPS)
    }
    written = decoded(connection, REWARDED)
    copies = Counter(identity(record) for _, record in written)
    assert copies == Counter(dict.fromkeys(read, 1))
    for message, record in written:
        at = source_position(Received(record, message.partition, message.offset))
        assert (at, message.partition) == (read[identity(record)], at.partition)
    assert_keys_in_order(record for _, record in written)


def assert_keys_in_order(written: Iterator[Record]) -> None:
    """What completes an item comes in the order of the log; Steps come before their End."""
    completed: defaultdict[str, list[int]] = defaultdict(list)
    ended: set[str] = set()
    inside: defaultdict[str, list[int]] = defaultdict(list)
    for record in written:
        about: Any = record
        uid, offset = about.trajectory_uid, about.source.offset
        if isinstance(record, Step):
            assert uid not in ended
            inside[uid].append(offset)
        elif isinstance(record, TrajectoryEnd):
            ended.add(uid)
            inside[uid].append(offset)
            completed[about.prompt_uid].append(offset)
        elif uid in ended:
            completed[about.prompt_uid].append(offset)
    for offsets in [*completed.values(), *inside.values()]:
        assert offsets == sorted(offsets)


def decoded(connection: Connection, topic: str) -> list[tuple[Any, Record]]:
    codec = connection.codec()
    return [(message, codec.decode(message.value)) for message in messages(connection, topic)]


def pause(chance: random.Random, longest: float) -> None:
    time.sleep(chance.uniform(0, longest))
