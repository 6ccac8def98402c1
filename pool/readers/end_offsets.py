"""End offsets of all partitions of a topic, sampled in one request, as the marks of a version need."""

import time

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec

from pool.connection import Connection
from pool.topics import find_topics
from servicekit.errors import BrokerUnavailable

TIMEOUT = 10.0
RETRY_AFTER = 0.2
POLL_EVERY = 0.02
READABLE_TIMEOUT = 60.0


class EndOffsets:
    """Samples the end offsets of some topics. It keeps its connection, since a trainer samples marks at
    every step."""

    def __init__(self, connection: Connection, *topics: str) -> None:
        self._connection = connection
        layouts = find_topics(connection)
        self._partitions = {topic: layouts[topic].partitions for topic in topics}
        self._admin: AdminClient | None = None

    def sample(self) -> dict[str, list[int]]:
        """For each topic the end offset of every partition. Every record that is appended later lies at
        or after it, in a transaction or not."""
        return self._sample(IsolationLevel.READ_UNCOMMITTED)

    def sample_readable(self) -> dict[str, list[int]]:
        """The same, as seen by readers of committed records only."""
        return self._sample(IsolationLevel.READ_COMMITTED)

    def _sample(self, level: IsolationLevel) -> dict[str, list[int]]:
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                return self._request(level)
            except (KafkaException, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise BrokerUnavailable(
                        f"{self._connection.bootstrap} does not return end offsets: {error}"
                    ) from error
                # A client keeps using the partition leaders that it knows, even when they refuse it.
                self._admin = None
                time.sleep(RETRY_AFTER)

    def _connect(self) -> AdminClient:
        """With the metadata of all topics: a client that looks for a partition's leader before it is
        connected may wait a second or three until it looks again."""
        admin = AdminClient(self._connection.confluent())
        admin.list_topics(timeout=TIMEOUT)
        return admin

    def _request(self, level: IsolationLevel) -> dict[str, list[int]]:
        partitions = {
            (topic, number): TopicPartition(self._connection.topic_name(topic), number)
            for topic, count in self._partitions.items()
            for number in range(count)
        }
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        self._admin = self._admin or self._connect()
        futures = self._admin.list_offsets(
            dict.fromkeys(partitions.values(), latest),
            isolation_level=level,
            request_timeout=TIMEOUT,
        )
        offsets = {
            partition: future.result(TIMEOUT).offset for partition, future in futures.items()
        }
        return {
            topic: [offsets[partitions[topic, number]] for number in range(count)]
            for topic, count in self._partitions.items()
        }


def wait_until_readable(connection: Connection, topic: str) -> None:
    """Waits until readers see all records that the topic has now. A commit is acknowledged before its
    markers are in the partitions, and until then readers see nothing of it."""
    ends = EndOffsets(connection, topic)
    written = ends.sample()[topic]
    deadline = time.monotonic() + READABLE_TIMEOUT
    while any(seen < end for seen, end in zip(ends.sample_readable()[topic], written, strict=True)):
        if time.monotonic() > deadline:
            raise BrokerUnavailable(
                f"Open transactions have kept readers from the end of {connection.topic_name(topic)} "
                f"for {READABLE_TIMEOUT:g} s"
            )
        time.sleep(POLL_EVERY)
