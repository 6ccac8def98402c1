"""Writing to and reading from the topics of a test."""

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from aiokafka import ConsumerRecord
from confluent_kafka import KafkaError, Message
from confluent_kafka import Producer as ConfluentProducer

from pool.connection import Connection
from pool.producers.output import producer_options
from pool.readers.end_offsets import wait_until_readable
from pool.readers.reader import open_topic
from schemas import Feedback, Position, Record, Step, StepNote, TrajectoryEnd

RecordT = TypeVar("RecordT", bound=Record)
PLAIN = {"enable.idempotence": False, "max.in.flight": 1}


def write(connection: Connection, topic: str, records: Iterable[Record]) -> list[Position]:
    """Appends records in order, keyed by prompt_uid, else by run; gives their places.

    An idempotent producer waits half a second for its id, which a test need not have."""
    producer = ConfluentProducer(producer_options(connection) | PLAIN)
    codec, name = connection.codec(), connection.topic_name(topic)
    places: list[Position | None] = []
    for index, record in enumerate(records):
        places.append(None)
        producer.produce(
            name,
            codec.encode(record, name),
            key_of(record),
            on_delivery=partial(_keep_place, places, index),
        )
    assert producer.flush(60) == 0, "the broker did not take the records"
    return [place for place in places if place is not None]


def _keep_place(
    places: list[Position | None], index: int, error: KafkaError | None, message: Message
) -> None:
    assert error is None, error.str()
    places[index] = Position(partition=message.partition() or 0, offset=message.offset() or 0)


def key_of(record: Record) -> str:
    return str(getattr(record, "prompt_uid", None) or getattr(record, "run"))  # noqa: B009


def messages(connection: Connection, topic: str) -> list[ConsumerRecord]:
    """Everything that a topic holds, by partition and offset."""
    return sorted(asyncio.run(_messages(connection, topic)), key=lambda m: (m.partition, m.offset))


async def _messages(connection: Connection, topic: str) -> list[ConsumerRecord]:
    async with open_topic(connection, topic) as reader:
        return [message async for message in reader.read_all()]


def records(connection: Connection, topic: str) -> list[Record]:
    codec = connection.codec()
    return [codec.decode(message.value) for message in messages(connection, topic)]


def committed(connection: Connection, topic: str) -> list[Record]:
    """Also what a process that ended just now has committed last."""
    wait_until_readable(connection, topic)
    return records(connection, topic)


def identity(record: Record) -> str:
    """The id by which readers fold duplicates."""
    match record:
        case Step():
            return record.step_id
        case TrajectoryEnd():
            return record.end_id
        case Feedback():
            return record.feedback_id
        case StepNote():
            return record.note_id
    raise AssertionError(f"{type(record).__name__} has no id of its own")


def until(done: Callable[[], bool], turn: Callable[[], None], limit: float = 120) -> None:
    """Takes turns until it is done."""
    deadline = time.monotonic() + limit
    while not done():
        assert time.monotonic() < deadline, f"it was not done after {limit:g} s"
        turn()
