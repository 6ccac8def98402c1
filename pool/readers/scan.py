"""Reading stretches of a topic at full speed, without a group.

For whoever reads much of the log and commits nothing: offline training, scoring again, exports. It
disturbs nobody: other readers' offsets are not touched, and what is fetched ahead is bounded.
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
"""Seconds without a record after which the brokers count as gone."""
NO_GROUP = "steplog-scan"
"""The client wants a name; without a commit or a subscription no group comes of it."""


class OffsetRange(NamedTuple):
    """A stretch of one partition: the first offset, and the one behind the last."""

    first: int
    end: int


class Scan:
    """Gives the messages of all spans, those of one partition in their order."""

    def __init__(
        self, connection: Connection, topic: str, spans: Mapping[int, OffsetRange]
    ) -> None:
        self.topic = connection.topic_name(topic)
        self.spans = {number: span for number, span in spans.items() if span.first < span.end}
        self.positions = {number: span.first for number, span in spans.items()}
        """Of each partition the next offset; over gaps that transactions leave, too."""
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
        """Offsets in all spans, markers and all."""
        return sum(span.end - span.first for span in self.spans.values())

    @property
    def done(self) -> int:
        return sum(self.positions[number] - span.first for number, span in self.spans.items())

    def __iter__(self) -> Iterator[Message]:
        for batch in self.batches():
            for message in batch:
                yield message
                self.positions[message.partition() or 0] = (message.offset() or 0) + 1
            self.positions.update(self._fetched)

    def is_over(self, partition: int) -> bool:
        """Whether all of its span was fetched."""
        return self._fetched[partition] >= self.spans[partition].end

    def hold(self, partitions: AbstractSet[int]) -> None:
        """Fetches no more of these for now, and of the others again."""
        held = {number for number in partitions if not self.is_over(number)}
        going = {number for number in self._held - held if not self.is_over(number)}
        self._consumer.pause([TopicPartition(self.topic, number) for number in held - self._held])
        self._consumer.resume([TopicPartition(self.topic, number) for number in going])
        self._held = held

    def batches(self) -> Iterator[list[Message]]:
        """As they are fetched. An empty one tells that some time has passed."""
        places = [
            TopicPartition(self.topic, number, span.first) for number, span in self.spans.items()
        ]
        self._consumer.assign(places)
        open_, silent = set(self.spans), 0.0
        while open_:
            messages = self._consumer.consume(BATCH, POLL)
            silent = 0.0 if messages else silent + POLL
            if silent >= SILENCE:
                raise BrokerUnavailable(
                    f"{self._bootstrap} gave nothing of {self.topic} for {SILENCE:g} s"
                )
            taken: list[Message] = []
            for message in messages:
                partition, offset = message.partition() or 0, message.offset() or 0
                if (error := message.error()) is not None:
                    self._note(error, partition, offset)
                elif partition in open_ and offset < self.spans[partition].end:
                    self._fetched[partition] = offset + 1
                    taken.append(message)
            open_ -= self._ended(open_)
            yield taken

    def _note(self, error: KafkaError, partition: int, offset: int) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            self._fetched[partition] = min(offset, self.spans[partition].end)
        elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise OffsetLost(
                f"partition {partition} of {self.topic} no longer holds, or does not yet hold, "
                f"offset {self._fetched[partition]}"
            )
        elif error.fatal():
            raise BrokerUnavailable(f"{self.topic} cannot be read: {error.str()}")

    def _ended(self, open_: set[int]) -> set[int]:
        """Partitions whose span is over; behind its last record there may be markers only."""
        places = [TopicPartition(self.topic, number) for number in open_]
        try:
            found = self._consumer.position(places)
        except KafkaException as error:
            raise BrokerUnavailable(
                f"{self.topic} cannot be read: {error.args[0].str()}"
            ) from error
        over = {
            place.partition
            for place in found
            if max(place.offset, self._fetched[place.partition]) >= self.spans[place.partition].end
        }
        for number in over:
            self._fetched[number] = self.spans[number].end
        if over:
            self._consumer.incremental_unassign(
                [TopicPartition(self.topic, number) for number in over]
            )
        return over


def received(message: Message, codec: Codec) -> Received:
    """The record that a message holds; Fatal when it is of a later version than we are."""
    value = message.value()
    assert value is not None, "a tombstone has no record"
    partition, offset = message.partition() or 0, message.offset() or 0
    try:
        header = value[:SINGLE_OBJECT_HEADER]
        return Received(codec.decode(value), partition, offset, header=header)
    except UnknownSchema as error:
        raise Fatal(
            f"offset {offset} of partition {partition} of {message.topic()} cannot be read: {error}; "
            "use the version of steplog that wrote it"
        ) from error
