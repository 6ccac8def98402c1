"""The topics: what exists, how it is kept, and whether a cluster fits."""

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
"""Right for one node. At most an eighth of the prompts in flight, or the load becomes uneven."""
TIMEOUT = 10.0
POLL = 0.05


class TopicSpec(NamedTuple):
    """One topic of the log."""

    records: tuple[type[Record], ...]
    cleanup: str
    retention: int
    ordered: bool = False
    """One partition, because the records of a run are read as one sequence."""
    optional: bool = False
    """Only the service that writes it needs it: a cluster from before it goes on without."""

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
TWIN = re.compile(rf"{REWARDED}\.{TAG.pattern}")


def rewarded_topic(tag: str | None) -> str:
    """Where the rewards of a tag stand. Without one it is the topic that everybody trains from; the
    others are its twins, made by scoring the same Steps in another way."""
    if tag is None:
        return REWARDED
    if not TAG.fullmatch(tag):
        raise Fatal(f"a tag has small letters, digits and dashes, and {tag!r} has others")
    return f"{REWARDED}.{tag}"


def spec_of(name: str) -> TopicSpec | None:
    """What a topic of ours is like; None: it is none of ours."""
    return TOPICS[REWARDED] if TWIN.fullmatch(name) else TOPICS.get(name)


class TopicLayout(NamedTuple):
    """What a cluster has of one topic."""

    partitions: int
    replication: int


def create(connection: Connection, partitions: int = PARTITIONS, replication: int = 1) -> list[str]:
    """Makes the topics that are missing and checks all of them; gives the names of the new ones."""
    existing = find_topics(connection)
    new = [
        NewTopic(
            connection.topic_name(name),
            num_partitions=1 if topic.ordered else _count(name, existing, partitions),
            replication_factor=replication,
            config=topic.config(),
        )
        for name, topic in TOPICS.items()
        if name not in existing
    ]
    _make(connection, new)
    _wait_until_seen(connection, TOPICS.keys())
    check(connection)
    return [topic.topic for topic in new]


def _make(connection: Connection, new: list[NewTopic]) -> None:
    admin = _admin(connection)
    for name, future in admin.create_topics(new).items() if new else ():
        try:
            _answer(future, connection)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise Fatal(f"topic {name} was not created: {error.args[0].str()}") from error


def create_rewarded_topic(connection: Connection, tag: str) -> bool:
    """Makes the rewarded topic of a tag, as the one without has been made; False: it is there."""
    name, found = rewarded_topic(tag), check(connection)
    if name in found:
        check_rewarded_topic(found, connection, name)
        return False
    topic = NewTopic(
        connection.topic_name(name),
        num_partitions=found[REWARDED].partitions,
        replication_factor=found[REWARDED].replication,
        config=TOPICS[REWARDED].config(),
    )
    _make(connection, [topic])
    _wait_until_seen(connection, {name})
    return True


def create_like(original: Connection, copy: Connection) -> None:
    """Makes the topics of another prefix as ours are, with the settings that somebody gave them."""
    found, there = find_topics(original), find_topics(copy)
    missing = {name: about for name, about in found.items() if name not in there}
    new = [
        NewTopic(
            copy.topic_name(name),
            num_partitions=about.partitions,
            replication_factor=about.replication,
            config=given,
        )
        for (name, about), given in zip(
            missing.items(), _given_settings(original, missing), strict=True
        )
    ]
    _make(copy, new)
    _wait_until_seen(copy, found.keys())


def _given_settings(connection: Connection, names: Iterable[str]) -> Iterator[dict[str, str]]:
    resources = [ConfigResource(ResourceType.TOPIC, connection.topic_name(name)) for name in names]
    admin = _admin(connection)
    for future in admin.describe_configs(resources).values() if resources else ():
        entries = _answer(future, connection).values()
        own = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        yield {entry.name: entry.value for entry in entries if entry.source == own}


def delete_records_before(connection: Connection, topic: str, firsts: Mapping[int, int]) -> None:
    """Deletes what lies before an offset of each partition."""
    name, admin = connection.topic_name(topic), _admin(connection)
    places = [TopicPartition(name, number, first) for number, first in firsts.items()]
    for future in admin.delete_records(places).values():
        _answer(future, connection)


def delete_topics(connection: Connection, names: Iterable[str]) -> None:
    """Deletes topics with all that they hold."""
    admin = _admin(connection)
    topics = [connection.topic_name(name) for name in names]
    for name, future in admin.delete_topics(topics).items():
        try:
            _answer(future, connection)
        except KafkaException as error:
            raise Fatal(f"topic {name} was not deleted: {error.args[0].str()}") from error


def check_rewarded_topic(
    found: Mapping[str, TopicLayout], connection: Connection, name: str
) -> None:
    """Refuses a topic of rewards that is not there, or that would split groups."""
    if name not in found:
        raise TopicMismatch(
            f"{connection.topic_name(name)} not found at {connection.bootstrap}; rewards get a tag "
            "with `steplog replay rescore --into` or `steplog reward --into`"
        )
    _check_same(found, connection, name)


def check(connection: Connection, *needed: str) -> dict[str, TopicLayout]:
    """Refuses a cluster on which groups would be split or records refused. `needed` are the optional
    topics that it must have, too."""
    found = find_topics(connection)
    missing = [
        connection.topic_name(name)
        for name, topic in TOPICS.items()
        if name not in found and (name in needed or not topic.optional)
    ]
    if missing:
        raise TopicMismatch(
            f"{', '.join(missing)} not found at {connection.bootstrap}; "
            "make what is missing with `steplog topics create`"
        )
    _check_same(found, connection, REWARDED)
    _check_sizes(connection, [name for name in TOPICS if name in found])
    return found


def _check_same(found: Mapping[str, TopicLayout], connection: Connection, name: str) -> None:
    steps, rewarded = found[STEPS].partitions, found[name].partitions
    if steps != rewarded:
        raise TopicMismatch(
            f"{connection.topic_name(STEPS)} has {steps} partitions and "
            f"{connection.topic_name(name)} has {rewarded}, so a group would lie in two places; "
            "make both anew with the same number"
        )


def find_topics(connection: Connection) -> dict[str, TopicLayout]:
    """Our topics that exist, by their names without the prefix."""
    client_errors = ClientErrors(connection)
    # It is polled for client_errors only; they are told by an error, not by log lines.
    admin = AdminClient(connection.confluent(client_errors.record) | {"log_level": 0})
    try:
        _connect(admin, client_errors)
        metadata = admin.list_topics(timeout=TIMEOUT)
    except KafkaException as error:
        admin.poll(0)
        raise client_errors.explain(
            f"no broker answers at {connection.bootstrap}",
            error.args[0],
            "start one with `steplog kafka start` or name yours with --bootstrap",
        ) from error
    prefix = connection.topic_prefix
    return {
        name: TopicLayout(len(about.partitions), len(about.partitions[0].replicas))
        for topic, about in metadata.topics.items()
        if topic.startswith(prefix)
        and spec_of(name := topic.removeprefix(prefix))
        and about.partitions
    }


def _connect(admin: AdminClient, client_errors: ClientErrors) -> None:
    """Waits for a first answer, but not when we are refused: librdkafka would go on trying."""
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
    """Brokers learn of a topic a moment after the controller has made it."""
    deadline = time.monotonic() + TIMEOUT
    while names - find_topics(connection).keys() and time.monotonic() < deadline:
        time.sleep(POLL)


def _count(name: str, existing: Mapping[str, TopicLayout], partitions: int) -> int:
    """The asked number, unless the topic's twin is there already."""
    twin = existing.get({STEPS: REWARDED, REWARDED: STEPS}.get(name, ""))
    return twin.partitions if twin else partitions


def _check_sizes(connection: Connection, names: Iterable[str]) -> None:
    resources = [ConfigResource(ResourceType.TOPIC, connection.topic_name(name)) for name in names]
    admin = _admin(connection)
    for resource, future in admin.describe_configs(resources).items():
        try:
            limit = int(_answer(future, connection)["max.message.bytes"].value)
        except KafkaException as error:
            raise Fatal(
                f"the settings of {resource.name} cannot be read: {error.args[0].str()}"
            ) from error
        if limit < MAX_MESSAGE_BYTES:
            raise TopicMismatch(
                f"{resource.name} takes messages of {limit:,} bytes and needs {MAX_MESSAGE_BYTES:,}; "
                "raise its max.message.bytes"
            )


def _answer(future: "Future[Any]", connection: Connection) -> Any:
    try:
        return future.result(TIMEOUT)
    except TimeoutError as error:
        raise BrokerUnavailable(
            f"{connection.bootstrap} gave no answer within {TIMEOUT:g} s"
        ) from error


def _admin(connection: Connection) -> AdminClient:
    """Keep it until its answers are there: they are cancelled when it is collected."""
    return AdminClient(connection.confluent())
