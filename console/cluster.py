"""What a cluster says of our topics and of the groups that read them. Nothing is joined."""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec

from console.look import Commit, PartitionBounds
from pool.connection import Connection
from pool.topics import find_topics, spec_of
from servicekit.errors import BrokerUnavailable

TIMEOUT = 10.0
LOOK_EVERY = 0.2


class Place(NamedTuple):
    topic: str
    partition: int


class GroupFacts(NamedTuple):
    members: int
    commits: Mapping[Place, Commit]
    assigned: frozenset[str]
    """Topics that its members have partitions of, committed or not."""

    def topics(self) -> set[str]:
        return {place.topic for place in self.commits} | self.assigned


class Facts(NamedTuple):
    brokers: int
    bounds: Mapping[Place, PartitionBounds]
    groups: Mapping[str, GroupFacts]


class Cluster:
    """Keeps its connection, for whoever looks again."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        find_topics(connection)  # tells in one sentence when we are refused, or nobody is there
        self._admin = self._connect()

    def _connect(self) -> AdminClient:
        return AdminClient(self._connection.confluent() | {"log_level": 0})

    def ask(self) -> Facts:
        try:
            brokers, places = self._topics()
            bounds = self._bounds(places)
            return Facts(brokers, bounds, self._groups({place.topic for place in places}))
        except (KafkaException, TimeoutError) as error:
            # A client sticks to the leaders that it knows, also when they refuse it for that.
            self._admin = self._connect()
            raise BrokerUnavailable(
                f"{self._connection.bootstrap} does not answer: {_reason(error)}"
            ) from error

    def _topics(self) -> tuple[int, list[Place]]:
        metadata = self._admin.list_topics(timeout=TIMEOUT)
        prefix = self._connection.topic_prefix
        places = [
            Place(topic, number)
            for topic, about in metadata.topics.items()
            if topic.startswith(prefix) and spec_of(topic.removeprefix(prefix)) is not None
            for number in about.partitions
        ]
        return len(metadata.brokers), sorted(places)

    def _bounds(self, places: Iterable[Place]) -> dict[Place, PartitionBounds]:
        asked = {place: TopicPartition(*place) for place in places}
        earliest = self._offsets(asked, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        latest = self._offsets(asked, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        return {
            place: PartitionBounds(
                topic=place.topic,
                partition=place.partition,
                oldest=earliest[place],
                end=latest[place],
            )
            for place in asked
        }

    def _offsets(self, asked: Mapping[Place, TopicPartition], spec: OffsetSpec) -> dict[Place, int]:
        if not asked:
            return {}
        wanted = dict.fromkeys(asked.values(), spec)
        answers = self._admin.list_offsets(wanted, request_timeout=TIMEOUT)
        return {place: _answer(answers[found]).offset for place, found in asked.items()}

    def _groups(self, topics: set[str]) -> dict[str, GroupFacts]:
        """Those that have committed, or are assigned, something of ours."""
        names = self._list_groups()
        if not names:
            return {}
        described = self._admin.describe_consumer_groups(names, request_timeout=TIMEOUT)
        offsets = {name: self._ask_offsets(name) for name in names}
        found = {name: _facts(described[name], offsets[name], topics) for name in names}
        return {name: facts for name, facts in found.items() if facts and facts.topics()}

    def _list_groups(self) -> list[str]:
        """A broker that has just started is still loading its groups, and answers without them."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            listed = _answer(self._admin.list_consumer_groups(request_timeout=TIMEOUT))
            if not listed.errors:
                return sorted(group.group_id for group in listed.valid)
            if time.monotonic() > deadline:
                raise listed.errors[0]
            time.sleep(LOOK_EVERY)

    def _ask_offsets(self, group: str) -> "Future[Any]":
        request = [ConsumerGroupTopicPartitions(group)]
        return self._admin.list_consumer_group_offsets(request, request_timeout=TIMEOUT)[group]


def _facts(described: "Future[Any]", offsets: "Future[Any]", topics: set[str]) -> GroupFacts | None:
    try:
        members, committed = _answer(described).members, _answer(offsets).topic_partitions
    except KafkaException as error:
        if error.args[0].name() == "GROUP_ID_NOT_FOUND":
            return None  # it went between two questions
        raise
    commits = {
        Place(found.topic, found.partition): Commit(found.offset, found.metadata)
        for found in committed
        if found.topic in topics and found.offset >= 0
    }
    assigned = {p.topic for member in members for p in member.assignment.topic_partitions}
    return GroupFacts(len(members), commits, frozenset(assigned & topics))


def _answer(future: "Future[Any]") -> Any:
    return future.result(TIMEOUT)


def _reason(error: Exception) -> str:
    return str(error.args[0].str()) if isinstance(error, KafkaException) else "no answer in time"
