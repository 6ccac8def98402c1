"""Groups that stand where a test wants them to."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from pool.connection import Connection

LIMIT_S = 60.0
POLL_S = 0.1


def commit(
    connection: Connection, group: str, topic: str, offsets: Mapping[int, tuple[int, str]]
) -> None:
    """Each partition's offset and metadata, as if the group had processed what lies before."""
    places = [
        TopicPartition(connection.topic_name(topic), number, offset, metadata)
        for number, (offset, metadata) in offsets.items()
    ]
    admin = AdminClient(connection.confluent())
    deadline = time.monotonic() + LIMIT_S
    while not _is_committed(admin, ConsumerGroupTopicPartitions(group, places)):
        assert time.monotonic() < deadline, "the group's coordinator does not come"
        time.sleep(POLL_S)


def _is_committed(admin: AdminClient, wanted: ConsumerGroupTopicPartitions) -> bool:
    """A fresh broker makes its coordinator at the first question, and refuses meanwhile."""
    asked = admin.alter_consumer_group_offsets([wanted])[wanted.group_id]
    return not any(place.error for place in asked.result(LIMIT_S).topic_partitions)


@contextmanager
def member(connection: Connection, group: str, topic: str) -> Iterator[None]:
    """Somebody who has joined the group and commits nothing."""
    options = connection.confluent(
        group_id=group, group_protocol=connection.group_protocol, enable_auto_commit=False
    )
    consumer = Consumer(options)
    try:
        consumer.subscribe([connection.topic_name(topic)])
        while not consumer.assignment():
            consumer.poll(0.1)
        yield
    finally:
        consumer.close()
