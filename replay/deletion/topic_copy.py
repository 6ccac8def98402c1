"""A topic copied without some of its records, every other one at the offset that it had.

Marks, Decisions, sources and committed offsets name offsets, so they hold in the copy as well. Where a
record is left out, and where a transaction or compaction left a gap, a tombstone takes the place. The
copy is written without transactions, since their markers would take offsets of their own: its end says
how far it is, so a copy that was killed is just gone on with.
"""

from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, Message
from confluent_kafka import Producer as ConfluentProducer

from pool.connection import Connection
from pool.consumers.partition import DELETED
from pool.producers.output import producer_options
from pool.readers.scan import OffsetRange, Scan
from replay.deletion.criteria import Forbidden, decoded
from servicekit.errors import BrokerUnavailable, Fatal
from servicekit.progress_bar import show_progress

GAP = b"steplog.gap"
"""Key of a tombstone where the original has no record. Compacted topics take none without a key."""
FLUSH = 120.0
LINGER_MS = 20


@dataclass(slots=True)
class Copied:
    kept: int = 0
    removed: int = 0
    scrubbed: int = 0
    filled: int = 0


class Copy:
    """Of one topic. `spans` are the offsets that the original holds; `begun` is how far the copy is."""

    def __init__(
        self,
        original: Connection,
        copy: Connection,
        topic: str,
        spans: dict[int, OffsetRange],
        begun: dict[int, int],
        forbidden: Forbidden,
    ) -> None:
        self.done = Copied()
        self._original = original
        self._topic = topic
        self._name = copy.topic_name(topic)
        self._spans = spans
        self._next = dict(begun)
        self._confirmed = dict(begun)
        self._stamps = dict.fromkeys(spans, 1)
        self._forbidden = forbidden
        self._codec = original.codec()
        self._failure: str | None = None
        self._producer = ConfluentProducer(producer_options(copy, linger_ms=LINGER_MS))

    def run(self) -> Copied:
        ahead = {n: OffsetRange(max(self._next[n], s.first), s.end) for n, s in self._spans.items()}
        with (
            Scan(self._original, self._topic, ahead) as scan,
            show_progress(self._topic, scan.total) as moved,
        ):
            for message in scan:
                self._copy(message)
                moved(scan.done)
        for number, span in self._spans.items():
            self._fill(number, span.end)
        if self._producer.flush(FLUSH):
            raise BrokerUnavailable(f"{self._name} was not acknowledged for {FLUSH:g} s")
        self._check()
        return self.done

    def _copy(self, message: Message) -> None:
        partition, offset = message.partition() or 0, message.offset() or 0
        self._fill(partition, offset)
        self._stamps[partition] = message.timestamp()[1]
        value = message.value()
        record = None if value is None else decoded(self._codec, value)
        if value is None or self._must_go(message, record):
            self.done.removed += value is not None
            self._put(partition, DELETED, None, None)
            return
        if record is not None and (kept := self._forbidden.scrubbed(record)) is not record:
            value = self._codec.encode(kept, self._name)
            self.done.scrubbed += 1
        self.done.kept += 1
        self._put(partition, message.key(), value, message.headers())

    def _must_go(self, message: Message, record: Any) -> bool:
        if record is not None:
            return self._forbidden.has(record)
        return holds(message, self._forbidden)

    def _fill(self, partition: int, end: int) -> None:
        while self._next[partition] < end:
            self._put(partition, GAP, None, None)
            self.done.filled += 1

    def _put(self, partition: int, key: Any, value: bytes | None, headers: Any) -> None:
        self._next[partition] += 1
        while True:
            try:
                self._producer.produce(
                    self._name,
                    value,
                    key,
                    partition,
                    self._delivered,
                    timestamp=max(1, self._stamps[partition]),
                    headers=headers,
                )
                break
            except BufferError:
                self._producer.poll(0.1)
                self._check()
        self._producer.poll(0)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        partition = message.partition() or 0
        if error is not None:
            self._failure = f"{self._name} does not take a record: {error.str()}"
        elif message.offset() != self._confirmed[partition]:
            self._failure = (
                f"somebody else writes to {self._name}: offset {self._confirmed[partition]} of "
                f"partition {partition} is taken; delete its topics, and begin again"
            )
        self._confirmed[partition] += 1

    def _check(self) -> None:
        if self._failure is not None:
            raise Fatal(self._failure)


def holds(message: Message, forbidden: Forbidden) -> bool:
    """Whether the bytes of a message name what must go, whatever they mean."""
    headers: Any = message.headers() or ()
    texts = [message.key(), message.value(), *(part for pair in headers for part in pair)]
    parts = [text.encode() if isinstance(text, str) else text for text in texts if text]
    return forbidden.has_key(parts[0] if message.key() else b"") or any(
        word in part for word in forbidden.words for part in parts
    )
