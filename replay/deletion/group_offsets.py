"""Copies the committed offsets of all consumer groups, with their bookmarks, to the copy's topics."""

from collections.abc import Mapping

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from pool.connection import Connection
from pool.consumers.transaction import read_offsets
from pool.topics import TopicLayout
from servicekit.errors import BrokerUnavailable, Fatal

REQUEST_TIMEOUT_S = 30.0


def copy_offsets(
    original: Connection, copy: Connection, layouts: Mapping[str, TopicLayout]
) -> list[str]:
    """Commits each group's offsets on the original's topics for the copy's. Returns the groups."""
    copied_names = {
        TopicPartition(original.topic_name(name), number): copy.topic_name(name)
        for name, layout in layouts.items()
        for number in range(layout.partitions)
    }
    copied_groups = []
    for group in _groups(original):
        consumer = Consumer(original.confluent(group_id=group, enable_auto_commit=False))
        try:
            commits = [
                TopicPartition(
                    copied_names[commit], commit.partition, commit.offset, commit.metadata
                )
                for commit in read_offsets(consumer, list(copied_names), REQUEST_TIMEOUT_S)
                if commit.offset >= 0
            ]
            if commits:
                _commit(consumer, group, commits)
                copied_groups.append(group)
        finally:
            consumer.close()
    return copied_groups


def _groups(connection: Connection) -> list[str]:
    admin = AdminClient(connection.confluent())
    try:
        request = admin.list_consumer_groups(request_timeout=REQUEST_TIMEOUT_S)
        groups = request.result(REQUEST_TIMEOUT_S)
    except (KafkaException, TimeoutError) as error:
        raise BrokerUnavailable(
            f"{connection.bootstrap} did not list its consumer groups: {error}"
        ) from error
    return sorted(group.group_id for group in groups.valid)


def _commit(consumer: Consumer, group: str, commits: list[TopicPartition]) -> None:
    try:
        consumer.commit(offsets=commits, asynchronous=False)
    except KafkaException as error:
        raise Fatal(
            f"Group {group} is active ({error.args[0].str()}). Stop all services, then run the same "
            "command again: it continues where it stopped."
        ) from error
