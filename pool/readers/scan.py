"""Reading ranges of a topic at full speed, without a consumer group.

For commands that read much of the log and commit nothing: offline training, rescoring, exports. Other
readers' offsets are not touched, and what is fetched ahead is bounded.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from types import TracebackType
from typing import NamedTuple, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from pool.connection import Connection
from pool.consumers.consumer import BATCH, consumer_options
from pool.core.progress import Received
from schemas import Codec, UnknownSchema
from schemas.codec import SINGLE_OBJECT_HEADER
from servicekit.errors import BrokerUnavailable, Fatal, OffsetLost

POLL = 0.1
"""Seconds to wait for a full batch."""
SILENCE = 30.0
"""Seconds without a record after which the brokers count as unavailable."""
NO_GROUP = "steplog-scan"
"""The client requires a group id; without a commit or a subscription no group is created."""


class OffsetRange(NamedTuple):
    """A range of one partition: the first offset, and the one behind the last."""

    first: int
    end: int


class Scan:
    """Iterates over the messages of all ranges; those of one partition are in order."""

    def __init__(
        self, connection: Connection, topic: str, ranges: Mapping[int, OffsetRange]
    ) -> None:
        self.topic = connection.topic_name(topic)
        self.ranges = {
            number: range_ for number, range_ in ranges.items() if range_.first < range_.end
        }
        self.positions = {number: range_.first for number, range_ in ranges.items()}
        """The next offset of each partition; it also advances over transaction markers."""
        self._fetched = dict(self.positions)
        self._held: set[int] = set()
        self._bootstrap = connection.bootstrap
        self._consumer = Consumer(
            consumer_options(connection, NO_GROUP) | {"enable.partition.eof": True}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._consumer.close()

    @property
    def total(self) -> int:
        """How many offsets all ranges have, including transaction markers."""
        return sum(range_.end - range_.first for range_ in self.ranges.values())

    @property
    def done(self) -> int:
        return sum(self.positions[number] - range_.first for number, range_ in self.ranges.items())

    def __iter__(self) -> Iterator[Message]:
        for batch in self.batches():
            for message in batch:
                yield message
                self.positions[message.partition() or 0] = (message.offset() or 0) + 1
            self.positions.update(self._fetched)

    def is_over(self, partition: int) -> bool:
        """Whether all of the partition's range was fetched."""
        return self._fetched[partition] >= self.ranges[partition].end

    def hold(self, partitions: AbstractSet[int]) -> None:
        """Pauses fetching of these partitions and resumes the others."""
        held = {number for number in partitions if not self.is_over(number)}
        going = {number for number in self._held - held if not self.is_over(number)}
        self._consumer.pause([TopicPartition(self.topic, number) for number in held - self._held])
        self._consumer.resume([TopicPartition(self.topic, number) for number in going])
        self._held = held

    def batches(self) -> Iterator[list[Message]]:
        """Messages as they are fetched. An empty batch means that some time has passed."""
        partitions = [
            TopicPartition(self.topic, number, range_.first)
            for number, range_ in self.ranges.items()
        ]
        self._consumer.assign(partitions)
        open_, silent = set(self.ranges), 0.0
        while open_:
            messages = self._consumer.consume(BATCH, POLL)
            silent = 0.0 if messages else silent + POLL
            if silent >= SILENCE:
                raise BrokerUnavailable(
                    f"{self._bootstrap} sent no records of {self.topic} for {SILENCE:g} s"
                )
            taken: list[Message] = []
            for message in messages:
                partition, offset = message.partition() or 0, message.offset() or 0
                if (error := message.error()) is not None:
                    self._handle_error(error, partition, offset)
                elif partition in open_ and offset < self.ranges[partition].end:
                    self._fetched[partition] = offset + 1
                    taken.append(message)
            open_ -= self._read_to_end(open_)
            yield taken

    def _handle_error(self, error: KafkaError, partition: int, offset: int) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            self._fetched[partition] = min(offset, self.ranges[partition].end)
        elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise OffsetLost(
                f"Partition {partition} of {self.topic} no longer has, or does not yet have, "
                f"offset {self._fetched[partition]}"
            )
        elif error.fatal():
            raise BrokerUnavailable(f"{self.topic} cannot be read: {error.str()}")

    def _read_to_end(self, open_: set[int]) -> set[int]:
        """Partitions whose range is read; only transaction markers may follow its last record."""
        partitions = [TopicPartition(self.topic, number) for number in open_]
        try:
            positions = self._consumer.position(partitions)
        except KafkaException as error:
            raise BrokerUnavailable(
                f"{self.topic} cannot be read: {error.args[0].str()}"
            ) from error
        over = {
            at.partition
            for at in positions
            if max(at.offset, self._fetched[at.partition]) >= self.ranges[at.partition].end
        }
        for number in over:
            self._fetched[number] = self.ranges[number].end
        if over:
            self._consumer.incremental_unassign(
                [TopicPartition(self.topic, number) for number in over]
            )
        return over


def decode_message(message: Message, codec: Codec) -> Received:
    """Decodes a message; raises Fatal when a later version of steplog wrote it."""
    value = message.value()
    assert value is not None, "a tombstone has no record"
    partition, offset = message.partition() or 0, message.offset() or 0
    try:
        header = value[:SINGLE_OBJECT_HEADER]
        return Received(codec.decode(value), partition, offset, header=header)
    except UnknownSchema as error:
        raise Fatal(
            f"Offset {offset} of partition {partition} of {message.topic()} cannot be read: {error}; "
            "use the version of steplog that wrote it"
        ) from error
