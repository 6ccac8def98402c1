"""Offsets of our topics and of the consumer groups that read them, as the cluster reports them. No
group is joined."""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec

from console.snapshot import CommittedOffset, PartitionOffsets
from pool.connection import Connection
from pool.topics import find_topics, spec_of
from servicekit.errors import BrokerUnavailable

TIMEOUT = 10.0
RETRY_EVERY = 0.2


class PartitionId(NamedTuple):
    """A partition of a topic; unlike confluent's TopicPartition it has no offset and is sortable."""

    topic: str
    partition: int


class GroupFacts(NamedTuple):
    members: int
    commits: Mapping[PartitionId, CommittedOffset]
    assigned: frozenset[str]
    """Topics of which its members have partitions assigned, with or without a commit."""

    def topics(self) -> set[str]:
        return {partition.topic for partition in self.commits} | self.assigned


class ClusterFacts(NamedTuple):
    brokers: int
    bounds: Mapping[PartitionId, PartitionOffsets]
    groups: Mapping[str, GroupFacts]


class Cluster:
    """A cluster, with a connection that is kept open between fetches."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        find_topics(connection)  # raises a clear error if access is refused or no broker answers
        self._admin = self._connect()

    def _connect(self) -> AdminClient:
        return AdminClient(self._connection.confluent() | {"log_level": 0})

    def fetch(self) -> ClusterFacts:
        try:
            brokers, partitions = self._fetch_topics()
            bounds = self._fetch_bounds(partitions)
            groups = self._fetch_groups({partition.topic for partition in partitions})
            return ClusterFacts(brokers, bounds, groups)
        except (KafkaException, TimeoutError) as error:
            # A client keeps using the leaders that it knows, even if they refuse it as not the leader.
            self._admin = self._connect()
            raise BrokerUnavailable(
                f"{self._connection.bootstrap} does not answer: {_describe(error)}"
            ) from error

    def _fetch_topics(self) -> tuple[int, list[PartitionId]]:
        metadata = self._admin.list_topics(timeout=TIMEOUT)
        prefix = self._connection.topic_prefix
        partitions = [
            PartitionId(topic, number)
            for topic, topic_metadata in metadata.topics.items()
            if topic.startswith(prefix) and spec_of(topic.removeprefix(prefix)) is not None
            for number in topic_metadata.partitions
        ]
        return len(metadata.brokers), sorted(partitions)

    def _fetch_bounds(
        self, partitions: Iterable[PartitionId]
    ) -> dict[PartitionId, PartitionOffsets]:
        requests = {partition: TopicPartition(*partition) for partition in partitions}
        earliest = self._fetch_offsets(requests, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        latest = self._fetch_offsets(requests, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        return {
            partition: PartitionOffsets(
                topic=partition.topic,
                partition=partition.partition,
                oldest=earliest[partition],
                end=latest[partition],
            )
            for partition in requests
        }

    def _fetch_offsets(
        self, requests: Mapping[PartitionId, TopicPartition], spec: OffsetSpec
    ) -> dict[PartitionId, int]:
        if not requests:
            return {}
        specs = dict.fromkeys(requests.values(), spec)
        answers = self._admin.list_offsets(specs, request_timeout=TIMEOUT)
        return {
            partition: _result(answers[request]).offset for partition, request in requests.items()
        }

    def _fetch_groups(self, topics: set[str]) -> dict[str, GroupFacts]:
        """The groups that have a commit or an assignment in one of these topics."""
        names = self._list_groups()
        if not names:
            return {}
        described = self._admin.describe_consumer_groups(names, request_timeout=TIMEOUT)
        offsets = {name: self._request_offsets(name) for name in names}
        groups = {name: _group_facts(described[name], offsets[name], topics) for name in names}
        return {name: facts for name, facts in groups.items() if facts and facts.topics()}

    def _list_groups(self) -> list[str]:
        """A broker that has just started may still be loading its groups, and then reports errors."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            listed = _result(self._admin.list_consumer_groups(request_timeout=TIMEOUT))
            if not listed.errors:
                return sorted(group.group_id for group in listed.valid)
            if time.monotonic() > deadline:
                raise listed.errors[0]
            time.sleep(RETRY_EVERY)

    def _request_offsets(self, group: str) -> "Future[Any]":
        request = [ConsumerGroupTopicPartitions(group)]
        return self._admin.list_consumer_group_offsets(request, request_timeout=TIMEOUT)[group]


def _group_facts(
    described: "Future[Any]", offsets: "Future[Any]", topics: set[str]
) -> GroupFacts | None:
    try:
        members, committed = _result(described).members, _result(offsets).topic_partitions
    except KafkaException as error:
        if error.args[0].name() == "GROUP_ID_NOT_FOUND":
            return None  # it was deleted between the two requests
        raise
    commits = {
        PartitionId(one.topic, one.partition): CommittedOffset(one.offset, one.metadata)
        for one in committed
        if one.topic in topics and one.offset >= 0
    }
    assigned = {p.topic for member in members for p in member.assignment.topic_partitions}
    return GroupFacts(len(members), commits, frozenset(assigned & topics))


def _result(future: "Future[Any]") -> Any:
    return future.result(TIMEOUT)


def _describe(error: Exception) -> str:
    return (
        str(error.args[0].str())
        if isinstance(error, KafkaException)
        else f"no answer within {TIMEOUT:.0f} s"
    )
