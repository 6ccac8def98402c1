"""The consumer groups of a log, for its copy: where they are, and how they get their state back."""

from collections.abc import Mapping

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from pool.connection import Connection
from pool.consumers.transaction import read_offsets
from pool.topics import TopicLayout
from servicekit.errors import BrokerUnavailable, Fatal

PATIENCE = 30.0


def copy_offsets(
    original: Connection, copy: Connection, found: Mapping[str, TopicLayout]
) -> list[str]:
    """Commits for the copy's topics what each group has for the original's; gives the groups."""
    places = {
        TopicPartition(original.topic_name(name), number): copy.topic_name(name)
        for name, about in found.items()
        for number in range(about.partitions)
    }
    moved = []
    for group in _groups(original):
        consumer = Consumer(original.confluent(group_id=group, enable_auto_commit=False))
        try:
            committed = [
                TopicPartition(places[at], at.partition, at.offset, at.metadata)
                for at in read_offsets(consumer, list(places), PATIENCE)
                if at.offset >= 0
            ]
            if committed:
                _commit(consumer, group, committed)
                moved.append(group)
        finally:
            consumer.close()
    return moved


def _groups(connection: Connection) -> list[str]:
    admin = AdminClient(connection.confluent())
    try:
        listed = admin.list_consumer_groups(request_timeout=PATIENCE).result(PATIENCE)
    except (KafkaException, TimeoutError) as error:
        raise BrokerUnavailable(
            f"{connection.bootstrap} does not tell its groups: {error}"
        ) from error
    return sorted(group.group_id for group in listed.valid)


def _commit(consumer: Consumer, group: str, places: list[TopicPartition]) -> None:
    try:
        consumer.commit(offsets=places, asynchronous=False)
    except KafkaException as error:
        raise Fatal(
            f"group {group} is at work ({error.args[0].str()}); stop all services, and give the same "
            "command again: it goes on where it was"
        ) from error
