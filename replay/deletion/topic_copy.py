"""Copies a topic without some of its records, every other one at its original offset.

Marks, Decisions, sources and committed offsets refer to offsets, so they stay valid in the copy. A
tombstone fills the offset of a record that is left out, and every gap of a transaction marker or of
compaction. The copy is written without transactions, since their markers would take offsets. Its end
offset tells how far it has come, so a copy that was killed is continued.
"""

from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, Message
from confluent_kafka import Producer as ConfluentProducer

from pool.connection import Connection
from pool.consumers.partition import DELETED
from pool.producers.output import producer_options
from pool.readers.scan import OffsetRange, Scan
from replay.deletion.criteria import DeletionCriteria, decode_or_none
from servicekit.errors import BrokerUnavailable, Fatal
from servicekit.progress_bar import show_progress

GAP = b"steplog.gap"
"""Key of a tombstone where the original has no record: compacted topics require a key."""
FLUSH_TIMEOUT_S = 120.0
LINGER_MS = 20


@dataclass(slots=True)
class CopyCounts:
    """Offsets of the copy, by what was written there."""

    kept: int = 0
    removed: int = 0
    scrubbed: int = 0
    filled: int = 0


class TopicCopy:
    """The copy of one topic. `ranges` are the offsets that the original holds, `copied_ends` the end
    offsets of the copy so far."""

    def __init__(
        self,
        original: Connection,
        copy: Connection,
        topic: str,
        ranges: dict[int, OffsetRange],
        copied_ends: dict[int, int],
        criteria: DeletionCriteria,
    ) -> None:
        self._counts = CopyCounts()
        self._original = original
        self._topic = topic
        self._name = copy.topic_name(topic)
        self._ranges = ranges
        self._next_offset = dict(copied_ends)
        self._acknowledged = dict(copied_ends)
        self._timestamps = dict.fromkeys(ranges, 1)
        self._criteria = criteria
        self._codec = original.codec()
        self._failure: str | None = None
        self._producer = ConfluentProducer(producer_options(copy, linger_ms=LINGER_MS))

    def run(self) -> CopyCounts:
        remaining = {
            number: OffsetRange(max(self._next_offset[number], stored.first), stored.end)
            for number, stored in self._ranges.items()
        }
        with (
            Scan(self._original, self._topic, remaining) as scan,
            show_progress(self._topic, scan.total) as update,
        ):
            for message in scan:
                self._copy(message)
                update(scan.done)
        for number, stored in self._ranges.items():
            self._fill(number, stored.end)
        if self._producer.flush(FLUSH_TIMEOUT_S):
            raise BrokerUnavailable(f"{self._name} was not acknowledged for {FLUSH_TIMEOUT_S:g} s")
        self._raise_failure()
        return self._counts

    def _copy(self, message: Message) -> None:
        partition, offset = message.partition() or 0, message.offset() or 0
        self._fill(partition, offset)
        self._timestamps[partition] = message.timestamp()[1]
        value = message.value()
        record = None if value is None else decode_or_none(self._codec, value)
        if value is None or self._is_deleted(message, record):
            self._counts.removed += value is not None
            self._put(partition, DELETED, None, None)
            return
        if record is not None and (scrubbed := self._criteria.scrub(record)) is not record:
            value = self._codec.encode(scrubbed, self._name)
            self._counts.scrubbed += 1
        self._counts.kept += 1
        self._put(partition, message.key(), value, message.headers())

    def _is_deleted(self, message: Message, record: Any) -> bool:
        if record is not None:
            return self._criteria.match(record)
        return match_bytes(message, self._criteria)

    def _fill(self, partition: int, end: int) -> None:
        while self._next_offset[partition] < end:
            self._put(partition, GAP, None, None)
            self._counts.filled += 1

    def _put(self, partition: int, key: Any, value: bytes | None, headers: Any) -> None:
        self._next_offset[partition] += 1
        while True:
            try:
                self._producer.produce(
                    self._name,
                    value,
                    key,
                    partition,
                    self._on_delivery,
                    timestamp=max(1, self._timestamps[partition]),
                    headers=headers,
                )
                break
            except BufferError:
                self._producer.poll(0.1)
                self._raise_failure()
        self._producer.poll(0)

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        partition = message.partition() or 0
        if error is not None:
            self._failure = f"A record was not written to {self._name}: {error.str()}"
        elif message.offset() != self._acknowledged[partition]:
            self._failure = (
                f"Another process writes to {self._name}: offset {self._acknowledged[partition]} of "
                f"partition {partition} is taken. Delete the topics of the copy and start again."
            )
        self._acknowledged[partition] += 1

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise Fatal(self._failure)


def match_bytes(message: Message, criteria: DeletionCriteria) -> bool:
    """Whether the key, value or headers name deleted data, whatever their format."""
    headers: Any = message.headers() or ()
    texts = [message.key(), message.value(), *(part for pair in headers for part in pair)]
    parts = [text.encode() if isinstance(text, str) else text for text in texts if text]
    return criteria.match_key(parts[0] if message.key() else b"") or any(
        pattern in part for pattern in criteria.byte_patterns for part in parts
    )
