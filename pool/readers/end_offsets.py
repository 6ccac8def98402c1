"""End offsets of whole topics, sampled in one request: the marks of a version, and what readers see."""

import time

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec

from pool.connection import Connection
from pool.topics import find_topics
from servicekit.errors import BrokerUnavailable

TIMEOUT = 10.0
AGAIN = 0.2
"""Seconds before it is asked again."""
LOOK_EVERY = 0.02
PATIENCE = 60.0


class EndOffsets:
    """Keeps its connection, since a trainer samples marks at every step."""

    def __init__(self, connection: Connection, *topics: str) -> None:
        self._connection = connection
        found = find_topics(connection)
        self._partitions = {topic: found[topic].partitions for topic in topics}
        self._admin = AdminClient(connection.confluent())

    def sample(self) -> dict[str, list[int]]:
        """For each topic the end offset of every partition. What is appended later lies at or after
        it, in a transaction or not."""
        return self._sample(IsolationLevel.READ_UNCOMMITTED)

    def sample_readable(self) -> dict[str, list[int]]:
        """Where those end who read committed records only."""
        return self._sample(IsolationLevel.READ_COMMITTED)

    def _sample(self, level: IsolationLevel) -> dict[str, list[int]]:
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                return self._ask(level)
            except (KafkaException, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise BrokerUnavailable(
                        f"{self._connection.bootstrap} does not tell where its topics end: {error}"
                    ) from error
                # A client sticks to the leaders that it knows, also when they refuse it for that.
                self._admin = AdminClient(self._connection.confluent())
                time.sleep(AGAIN)

    def _ask(self, level: IsolationLevel) -> dict[str, list[int]]:
        places = {
            (topic, number): TopicPartition(self._connection.topic_name(topic), number)
            for topic, count in self._partitions.items()
            for number in range(count)
        }
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = self._admin.list_offsets(
            dict.fromkeys(places.values(), latest),
            isolation_level=level,
            request_timeout=TIMEOUT,
        )
        answers = {place: future.result(TIMEOUT).offset for place, future in asked.items()}
        return {
            topic: [answers[places[topic, number]] for number in range(count)]
            for topic, count in self._partitions.items()
        }


def wait_until_readable(connection: Connection, topic: str) -> None:
    """Until readers see all that the topic has now. A commit is answered before its markers are in
    the partitions, and until then they see none of it."""
    ends = EndOffsets(connection, topic)
    written = ends.sample()[topic]
    deadline = time.monotonic() + PATIENCE
    while any(seen < end for seen, end in zip(ends.sample_readable()[topic], written, strict=True)):
        if time.monotonic() > deadline:
            raise BrokerUnavailable(
                f"transactions keep readers from the end of {connection.topic_name(topic)} "
                f"for {PATIENCE:g} s"
            )
        time.sleep(LOOK_EVERY)
