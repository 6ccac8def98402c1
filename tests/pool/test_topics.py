"""The topics are made as declared, and a cluster that does not fit is refused in one sentence."""

from collections.abc import Mapping

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic

from pool import topics
from pool.connection import MAX_MESSAGE_BYTES, Connection
from pool.topics import (
    ATROPOS,
    DEAD_LETTERS,
    LEDGER,
    POLICY,
    REWARDED,
    STEPS,
    TOPICS,
    TRAJECTORIES,
    TopicLayout,
)
from servicekit.errors import BrokerUnavailable, Fatal, TopicMismatch
from tests.conftest import free_port

pytestmark = pytest.mark.broker

DAY = 24 * 3600 * 1000


def make(
    connection: Connection, name: str, partitions: int, config: Mapping[str, str] | None = None
) -> None:
    admin = AdminClient(connection.confluent())
    topic = NewTopic(connection.topic_name(name), partitions, 1, config=dict(config or {}))
    for future in admin.create_topics([topic]).values():
        future.result(60)
    while name not in topics.find_topics(connection):
        pass


def config(connection: Connection, name: str) -> dict[str, str]:
    admin = AdminClient(connection.confluent())
    resource = ConfigResource(ResourceType.TOPIC, connection.topic_name(name))
    (future,) = admin.describe_configs([resource]).values()
    return {key: entry.value for key, entry in future.result(60).items()}


def partitions(connection: Connection) -> dict[str, int]:
    return {name: found.partitions for name, found in topics.find_topics(connection).items()}


def test_creating_makes_every_topic_and_checks_them(connection: Connection) -> None:
    new = topics.create(connection, partitions=5)
    assert new == [connection.topic_name(name) for name in TOPICS]
    assert topics.check(connection) == {
        STEPS: TopicLayout(5, 1),
        REWARDED: TopicLayout(5, 1),
        POLICY: TopicLayout(1, 1),
        LEDGER: TopicLayout(1, 1),
        TRAJECTORIES: TopicLayout(5, 1),
        DEAD_LETTERS: TopicLayout(5, 1),
        ATROPOS: TopicLayout(1, 1),
    }


def test_creating_again_changes_nothing(connection: Connection) -> None:
    topics.create(connection, partitions=2)
    before = topics.find_topics(connection)
    assert topics.create(connection, partitions=7) == []
    assert topics.find_topics(connection) == before


@pytest.mark.parametrize(("twin", "other"), [(STEPS, REWARDED), (REWARDED, STEPS)])
def test_a_twin_gets_the_partitions_of_the_one_that_exists(
    connection: Connection, twin: str, other: str
) -> None:
    make(connection, twin, 3, {"max.message.bytes": str(MAX_MESSAGE_BYTES)})
    new = topics.create(connection, partitions=8)
    assert connection.topic_name(twin) not in new
    assert partitions(connection)[other] == 3


def test_topics_are_kept_as_declared(connection: Connection) -> None:
    topics.create(connection, partitions=1)
    kept = {name: config(connection, name) for name in TOPICS}
    assert {name: found["cleanup.policy"] for name, found in kept.items()} == {
        STEPS: "delete",
        REWARDED: "delete",
        POLICY: "delete",
        LEDGER: "delete",
        TRAJECTORIES: "compact,delete",
        DEAD_LETTERS: "delete",
        ATROPOS: "delete",
    }
    assert {name: int(found["retention.ms"]) for name, found in kept.items()} == {
        STEPS: -1,
        REWARDED: 30 * DAY,
        POLICY: -1,
        LEDGER: -1,
        TRAJECTORIES: 7 * DAY,
        DEAD_LETTERS: 30 * DAY,
        ATROPOS: -1,
    }
    assert {found["max.message.bytes"] for found in kept.values()} == {str(MAX_MESSAGE_BYTES)}


def test_two_prefixes_share_a_cluster(connection: Connection) -> None:
    other = connection.model_copy(update={"topic_prefix": connection.topic_prefix + "other."})
    topics.create(connection, partitions=1)
    assert topics.find_topics(other) == {}
    topics.create(other, partitions=2)
    assert partitions(connection)[STEPS] == 1


def test_a_check_names_what_is_missing(connection: Connection) -> None:
    for name in (STEPS, REWARDED, POLICY, LEDGER):
        make(connection, name, 1, {"max.message.bytes": str(MAX_MESSAGE_BYTES)})
    missing = ", ".join(connection.topic_name(name) for name in (TRAJECTORIES, DEAD_LETTERS))
    with pytest.raises(TopicMismatch, match=rf"^{missing} not found .* `steplog topics create`$"):
        topics.check(connection)


def test_a_topic_that_one_service_needs_is_asked_of_that_one_only(connection: Connection) -> None:
    for name in TOPICS.keys() - {ATROPOS}:
        make(connection, name, 1, {"max.message.bytes": str(MAX_MESSAGE_BYTES)})
    assert ATROPOS not in topics.check(connection)
    with pytest.raises(TopicMismatch, match=rf"^{connection.topic_name(ATROPOS)} not found "):
        topics.check(connection, ATROPOS)


def test_twins_with_different_partitions_are_refused(connection: Connection) -> None:
    make(connection, STEPS, 2)
    make(connection, REWARDED, 3)
    with pytest.raises(TopicMismatch, match=r"steps has 2 partitions and .*rewarded has 3, so"):
        topics.create(connection)


def test_a_topic_that_refuses_our_largest_record_is_refused(connection: Connection) -> None:
    make(connection, POLICY, 1, {"max.message.bytes": "1048588"})
    with pytest.raises(
        TopicMismatch,
        match=r"policy accepts messages of 1,048,588 bytes, and 8,454,144 are needed; raise",
    ):
        topics.create(connection, partitions=1)


def test_more_copies_than_brokers_are_refused_in_words(connection: Connection) -> None:
    with pytest.raises(Fatal, match=rf"Topic {connection.topic_prefix}\S+ was not created: "):
        topics.create(connection, replication=3)
    assert topics.find_topics(connection) == {}


def test_a_cluster_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "TIMEOUT", 0.5)
    connection = Connection(bootstrap=f"127.0.0.1:{free_port()}")
    with pytest.raises(BrokerUnavailable, match=f"no broker answers at {connection.bootstrap}: "):
        topics.check(connection)
