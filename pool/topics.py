"""The topics of the log: their settings, creating them, and checking that a cluster fits."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource, ConfigSource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic, TopicPartition

from pool.client_errors import ClientErrors
from pool.connection import MAX_MESSAGE_BYTES, Connection
from schemas import (
    AtroposEvent,
    Decision,
    Feedback,
    Outcome,
    PolicyVersion,
    Record,
    Registration,
    ScoredGroup,
    Step,
    StepNote,
    TrajectoryEnd,
)
from servicekit.errors import BrokerUnavailable, Fatal, TopicMismatch

STEPS = "steps"
REWARDED = "rewarded"
POLICY = "policy"
LEDGER = "ledger"
TRAJECTORIES = "trajectories"
ATROPOS = "atropos"
DEAD_LETTERS = "dead-letters"

DAY = 24 * 3600 * 1000
FOREVER = -1
PARTITIONS = 12
"""Suits one node. More than an eighth of the prompts in flight would make the load uneven."""
TIMEOUT = 10.0
POLL = 0.05


class TopicSpec(NamedTuple):
    """The settings of one topic."""

    records: tuple[type[Record], ...]
    cleanup: str
    retention: int
    ordered: bool = False
    """Whether it has one partition, because the records of a run are read as one sequence."""
    optional: bool = False
    """Whether only the service that writes it needs it; clusters created before it work without."""

    def config(self) -> dict[str, str]:
        return {
            "cleanup.policy": self.cleanup,
            "retention.ms": str(self.retention),
            "max.message.bytes": str(MAX_MESSAGE_BYTES),
        }


TOPICS: Mapping[str, TopicSpec] = {
    STEPS: TopicSpec((Step, TrajectoryEnd, Feedback, StepNote), "delete", FOREVER),
    REWARDED: TopicSpec((Step, TrajectoryEnd, Feedback, StepNote, ScoredGroup), "delete", 30 * DAY),
    POLICY: TopicSpec((PolicyVersion,), "delete", FOREVER, ordered=True),
    LEDGER: TopicSpec((Decision, Outcome), "delete", FOREVER, ordered=True),
    TRAJECTORIES: TopicSpec((Registration,), "compact,delete", 7 * DAY),
    ATROPOS: TopicSpec((AtroposEvent,), "delete", FOREVER, ordered=True, optional=True),
    DEAD_LETTERS: TopicSpec((), "delete", 30 * DAY),
}


TAG = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
TAGGED_TOPIC = re.compile(rf"{REWARDED}\.{TAG.pattern}")


def rewarded_topic(tag: str | None) -> str:
    """The topic with the rewards of a tag. Without a tag it is `rewarded`, which trainers use by
    default; tags hold the rewards of the same Steps scored in another way."""
    if tag is None:
        return REWARDED
    if not TAG.fullmatch(tag):
        raise Fatal(
            f"{tag!r} cannot be a tag: use up to 63 lower-case letters, digits and dashes, and do not "
            "begin with a dash"
        )
    return f"{REWARDED}.{tag}"


def spec_of(name: str) -> TopicSpec | None:
    """The settings of a topic, by its name without the prefix; None if it is not one of the log."""
    return TOPICS[REWARDED] if TAGGED_TOPIC.fullmatch(name) else TOPICS.get(name)


class TopicLayout(NamedTuple):
    """The partitions and replicas that an existing topic has."""

    partitions: int
    replication: int


def create(connection: Connection, partitions: int = PARTITIONS, replication: int = 1) -> list[str]:
    """Creates the missing topics and checks all of them; returns the names of the new ones."""
    existing = find_topics(connection)
    new = [
        NewTopic(
            connection.topic_name(name),
            num_partitions=1 if topic.ordered else _partition_count(name, existing, partitions),
            replication_factor=replication,
            config=topic.config(),
        )
        for name, topic in TOPICS.items()
        if name not in existing
    ]
    _create_all(connection, new)
    _wait_until_seen(connection, TOPICS.keys())
    check(connection)
    return [topic.topic for topic in new]


def _create_all(connection: Connection, new: list[NewTopic]) -> None:
    admin = _admin(connection)
    for name, future in admin.create_topics(new).items() if new else ():
        try:
            _result(future, connection)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise Fatal(f"Topic {name} was not created: {error.args[0].str()}") from error


def create_rewarded_topic(connection: Connection, tag: str) -> bool:
    """Creates the topic for the rewards of a tag, with the layout of `rewarded`; False if it exists."""
    name, layouts = rewarded_topic(tag), check(connection)
    if name in layouts:
        check_rewarded_topic(layouts, connection, name)
        return False
    topic = NewTopic(
        connection.topic_name(name),
        num_partitions=layouts[REWARDED].partitions,
        replication_factor=layouts[REWARDED].replication,
        config=TOPICS[REWARDED].config(),
    )
    _create_all(connection, [topic])
    _wait_until_seen(connection, {name})
    return True


def create_like(original: Connection, copy: Connection) -> None:
    """Creates the topics of another prefix as copies of ours, with their topic-level settings."""
    layouts, existing = find_topics(original), find_topics(copy)
    missing = {name: layout for name, layout in layouts.items() if name not in existing}
    new = [
        NewTopic(
            copy.topic_name(name),
            num_partitions=layout.partitions,
            replication_factor=layout.replication,
            config=config,
        )
        for (name, layout), config in zip(
            missing.items(), _topic_configs(original, missing), strict=True
        )
    ]
    _create_all(copy, new)
    _wait_until_seen(copy, layouts.keys())


def _topic_configs(connection: Connection, names: Iterable[str]) -> Iterator[dict[str, str]]:
    """The settings that were made for each topic itself, without the broker's defaults."""
    resources = [ConfigResource(ResourceType.TOPIC, connection.topic_name(name)) for name in names]
    admin = _admin(connection)
    for future in admin.describe_configs(resources).values() if resources else ():
        entries = _result(future, connection).values()
        own = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        yield {entry.name: entry.value for entry in entries if entry.source == own}


def delete_records_before(connection: Connection, topic: str, firsts: Mapping[int, int]) -> None:
    """Deletes the records before an offset of each partition."""
    name, admin = connection.topic_name(topic), _admin(connection)
    partitions = [TopicPartition(name, number, first) for number, first in firsts.items()]
    for future in admin.delete_records(partitions).values():
        _result(future, connection)


def delete_topics(connection: Connection, names: Iterable[str]) -> None:
    """Deletes topics and all of their records."""
    admin = _admin(connection)
    topics = [connection.topic_name(name) for name in names]
    for name, future in admin.delete_topics(topics).items():
        try:
            _result(future, connection)
        except KafkaException as error:
            raise Fatal(f"Topic {name} was not deleted: {error.args[0].str()}") from error


def check_rewarded_topic(
    layouts: Mapping[str, TopicLayout], connection: Connection, name: str
) -> None:
    """Raises TopicMismatch if a topic of rewards does not exist or would split groups."""
    if name not in layouts:
        raise TopicMismatch(
            f"{connection.topic_name(name)} not found at {connection.bootstrap}; create the rewards "
            "of a tag with `steplog replay rescore --into` or `steplog reward --into`"
        )
    _check_partitions(layouts, connection, name)


def check(connection: Connection, *needed: str) -> dict[str, TopicLayout]:
    """Raises TopicMismatch if topics are missing, or if groups would be split or records refused.
    `needed` are optional topics that must exist too."""
    layouts = find_topics(connection)
    missing = [
        connection.topic_name(name)
        for name, topic in TOPICS.items()
        if name not in layouts and (name in needed or not topic.optional)
    ]
    if missing:
        raise TopicMismatch(
            f"{', '.join(missing)} not found at {connection.bootstrap}; "
            "create missing topics with `steplog topics create`"
        )
    _check_partitions(layouts, connection, REWARDED)
    _check_sizes(connection, [name for name in TOPICS if name in layouts])
    return layouts


def _check_partitions(
    layouts: Mapping[str, TopicLayout], connection: Connection, name: str
) -> None:
    steps, rewarded = layouts[STEPS].partitions, layouts[name].partitions
    if steps != rewarded:
        raise TopicMismatch(
            f"{connection.topic_name(STEPS)} has {steps} partitions and "
            f"{connection.topic_name(name)} has {rewarded}, so groups would be split; "
            "create both topics again with the same number of partitions"
        )


def find_topics(connection: Connection) -> dict[str, TopicLayout]:
    """The topics of the log that exist, by their names without the prefix."""
    client_errors = ClientErrors(connection)
    # Its errors are reported by what is raised here, not by log lines.
    admin = AdminClient(connection.confluent(client_errors.record) | {"log_level": 0})
    try:
        _connect(admin, client_errors)
        metadata = admin.list_topics(timeout=TIMEOUT)
    except KafkaException as error:
        admin.poll(0)
        raise client_errors.explain(
            f"no broker answers at {connection.bootstrap}",
            error.args[0],
            "start one with `steplog kafka start`, or give another address with --bootstrap",
        ) from error
    prefix = connection.topic_prefix
    return {
        name: TopicLayout(len(described.partitions), len(described.partitions[0].replicas))
        for topic, described in metadata.topics.items()
        if topic.startswith(prefix)
        and spec_of(name := topic.removeprefix(prefix))
        and described.partitions
    }


def _connect(admin: AdminClient, client_errors: ClientErrors) -> None:
    """Waits for a first answer, but not after access was refused: librdkafka would keep trying."""
    answer = admin.describe_cluster(request_timeout=TIMEOUT)
    while True:
        try:
            answer.result(POLL)
            return
        except TimeoutError:
            admin.poll(0)
            if refusal := client_errors.access_refusal():
                raise refusal from None


def _wait_until_seen(connection: Connection, names: AbstractSet[str]) -> None:
    """Brokers learn of a topic a moment after the controller has created it."""
    deadline = time.monotonic() + TIMEOUT
    while names - find_topics(connection).keys() and time.monotonic() < deadline:
        time.sleep(POLL)


def _partition_count(name: str, existing: Mapping[str, TopicLayout], partitions: int) -> int:
    """The given number, unless `steps` or `rewarded` exists, whose number its counterpart must have."""
    counterpart = existing.get({STEPS: REWARDED, REWARDED: STEPS}.get(name, ""))
    return counterpart.partitions if counterpart else partitions


def _check_sizes(connection: Connection, names: Iterable[str]) -> None:
    resources = [ConfigResource(ResourceType.TOPIC, connection.topic_name(name)) for name in names]
    admin = _admin(connection)
    for resource, future in admin.describe_configs(resources).items():
        try:
            limit = int(_result(future, connection)["max.message.bytes"].value)
        except KafkaException as error:
            raise Fatal(
                f"The settings of {resource.name} cannot be read: {error.args[0].str()}"
            ) from error
        if limit < MAX_MESSAGE_BYTES:
            raise TopicMismatch(
                f"{resource.name} accepts messages of {limit:,} bytes, and {MAX_MESSAGE_BYTES:,} are "
                "needed; raise its max.message.bytes"
            )


def _result(future: "Future[Any]", connection: Connection) -> Any:
    try:
        return future.result(TIMEOUT)
    except TimeoutError as error:
        raise BrokerUnavailable(
            f"{connection.bootstrap} did not answer within {TIMEOUT:g} s"
        ) from error


def _admin(connection: Connection) -> AdminClient:
    """Keep the client until its futures are done: they are cancelled when it is garbage-collected."""
    return AdminClient(connection.confluent())
