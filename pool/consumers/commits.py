"""The committed offsets of a consumer group, read and set from outside the group."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from confluent_kafka import Consumer, KafkaException, TopicPartition

from pool.connection import Connection
from pool.consumers.transaction import read_offsets
from servicekit.errors import BrokerUnavailable

TIMEOUT_S = 30.0


def read_commits(
    connection: Connection, group: str, partitions: Sequence[TopicPartition]
) -> list[TopicPartition]:
    """The group's commits in the order of `partitions`, read once no transaction on them is open. A
    negative offset means that there is no commit."""
    with _open_consumer(connection, group) as consumer:
        return read_offsets(consumer, partitions, TIMEOUT_S)


def set_commits(connection: Connection, group: str, offsets: Sequence[TopicPartition]) -> None:
    """Sets all of the offsets or none. The broker refuses this while the group has members."""
    with _open_consumer(connection, group) as consumer:
        try:
            consumer.commit(offsets=list(offsets), asynchronous=False)
        except KafkaException as error:
            raise BrokerUnavailable(
                f"{connection.bootstrap} did not accept the offsets of group {group}: "
                f"{error.args[0].str()}"
            ) from error


@contextmanager
def _open_consumer(connection: Connection, group: str) -> Iterator[Consumer]:
    """A client that names the group but does not join it."""
    consumer = Consumer(connection.confluent(group_id=group, enable_auto_commit=False))
    try:
        yield consumer
    finally:
        consumer.close()
