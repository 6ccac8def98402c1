"""What a group has committed, read and set by somebody who is no member of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from confluent_kafka import Consumer, KafkaException
from confluent_kafka import TopicPartition as Place

from pool.connection import Connection
from pool.consumers.transaction import read_offsets
from servicekit.errors import BrokerUnavailable

PATIENCE = 30.0


def read_commits(connection: Connection, group: str, places: Sequence[Place]) -> list[Place]:
    """In the same order, once no transaction on them is open; a negative offset: there is none."""
    with _outsider(connection, group) as consumer:
        return read_offsets(consumer, places, PATIENCE)


def set_commits(connection: Connection, group: str, places: Sequence[Place]) -> None:
    """All of them at once, or none. The broker refuses it while the group has members."""
    with _outsider(connection, group) as consumer:
        try:
            consumer.commit(offsets=list(places), asynchronous=False)
        except KafkaException as error:
            raise BrokerUnavailable(
                f"{connection.bootstrap} does not take the offsets of group {group}: "
                f"{error.args[0].str()}"
            ) from error


@contextmanager
def _outsider(connection: Connection, group: str) -> Iterator[Consumer]:
    consumer = Consumer(connection.confluent(group_id=group, enable_auto_commit=False))
    try:
        yield consumer
    finally:
        consumer.close()
