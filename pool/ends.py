"""End offsets of whole topics, sampled in one request: the marks of a version."""

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec

from pool.connection import Connection
from pool.errors import BrokerUnavailable
from pool.topics import find

TIMEOUT = 10.0


class Ends:
    """Keeps its connection, since a trainer samples marks at every step."""

    def __init__(self, connection: Connection, *topics: str) -> None:
        self._connection = connection
        found = find(connection)
        self._partitions = {topic: found[topic].partitions for topic in topics}
        self._admin = AdminClient(connection.confluent())

    def sample(self) -> dict[str, list[int]]:
        """For each topic the end offset of every partition. What is appended later lies at or after
        it, in a transaction or not."""
        places = {
            (topic, number): TopicPartition(self._connection.topic_name(topic), number)
            for topic, count in self._partitions.items()
            for number in range(count)
        }
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = self._admin.list_offsets(
            dict.fromkeys(places.values(), latest),
            isolation_level=IsolationLevel.READ_UNCOMMITTED,
            request_timeout=TIMEOUT,
        )
        try:
            answers = {place: future.result(TIMEOUT).offset for place, future in asked.items()}
        except (KafkaException, TimeoutError) as error:
            raise BrokerUnavailable(
                f"{self._connection.bootstrap} does not tell where its topics end: {error}"
            ) from error
        return {
            topic: [answers[places[topic, number]] for number in range(count)]
            for topic, count in self._partitions.items()
        }
