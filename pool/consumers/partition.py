"""One partition that a consumer holds: how far it is read, and what waits for the next transaction.

`Progress` knows items and offsets; this is where they meet Kafka's messages and commits.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic

from confluent_kafka import Message
from confluent_kafka import TopicPartition as Place

from pool.core.bookmark import MAX_TEXT, Bookmark, strip_mark
from pool.core.dead_letters import DeadLetter, PoisonLimiter
from pool.core.progress import Assembler, ItemT, Progress, Received, WorkItem
from schemas import Codec, PartitionOffsets, SchemaError
from servicekit.errors import OffsetLost
from servicekit.tracing import traceparent_of

log = logging.getLogger(__name__)

DELETED = b"steplog.deleted"
"""Key of a tombstone in the place of a record that was deleted on purpose."""
FULL_TEXT = MAX_TEXT // 2
"""A partition pauses when its bookmark is this long: one more batch must still fit."""


@dataclass(slots=True, eq=False)
class AssignedPartition(Generic[ItemT]):
    topic: str
    progress: Progress[ItemT]
    saved: tuple[int, str]
    """Offset and bookmark as the group has them."""
    position: int
    """Of the next record to read."""
    limiter: PoisonLimiter = field(default_factory=PoisonLimiter)
    dead: list[tuple[DeadLetter, str]] = field(default_factory=list)
    """Records that cannot be used, and why; they go with the next transaction."""
    paused: bool = False
    end: int | None = None
    """What lies here or behind is not read."""

    @classmethod
    def load(
        cls, place: Place, low: int, assembler: Assembler[ItemT], accept_loss: bool = False
    ) -> "AssignedPartition[ItemT]":
        """The partition as the group has it; `low` is the first offset that the log still holds. With
        `accept_loss`, state whose records are gone is given up."""
        committed = place.offset if place.offset >= 0 else low
        bookmark = Bookmark.parse(place.metadata if place.offset >= 0 else None, committed)
        if bookmark.rebuild < low and accept_loss:
            committed = max(committed, low)
            bookmark = Bookmark(committed, ())
        elif bookmark.rebuild < low:
            raise OffsetLost(
                f"{place.topic}[{place.partition}] begins at offset {low}, and open state needs the "
                f"records from {bookmark.rebuild} on: retention has deleted them"
            )
        progress = Progress(place.partition, assembler, committed, bookmark)
        start = max(low, min(progress.read_from(), committed))
        return cls(place.topic, progress, saved_at(place), start)

    def receive(self, message: Message, codec: Codec) -> list[WorkItem[ItemT]]:
        """Takes the next message; gives the work that it makes ready."""
        offset = message.offset()
        assert offset is not None
        if offset < self.position or (self.end is not None and offset >= self.end):
            return []
        self.position = offset + 1
        if message.value() is None:
            self.progress.deleted |= message.key() == DELETED
            return []  # the place of a record that is gone
        try:
            record = codec.decode(message.value())
        except SchemaError as error:
            self._bury(message, offset, str(error))
            return []
        self.limiter.count_good()
        trace = traceparent_of(message.headers())
        return self.progress.feed(Received(record, self.progress.partition, offset, trace))

    def advance(self, position: int) -> list[WorkItem[ItemT]]:
        """Takes over a position behind transaction markers, which are no records. Before the first
        record a client answers with a negative number."""
        if self.end is not None:
            position = min(position, self.end)
        self.position = max(self.position, position)
        return self.progress.reach(self.position)

    def is_full(self) -> bool:
        # Two bytes name most items; only a partition that may be full is worth the exact answer.
        if len(self.progress.open) * 2 < FULL_TEXT // 4:
            return False
        return len(self.progress.bookmark(self.position).text()) > FULL_TEXT

    def is_over(self) -> bool:
        return self.end is not None and self.position >= self.end

    def is_idle(self, done: Iterable[WorkItem[ItemT]] = ()) -> bool:
        """Nothing is open, and no work waits but what is done."""
        waiting = self.progress.open.keys() - {work.offset for work in done}
        return not waiting and self.progress.assembler.oldest_open() is None

    def here(self) -> Place:
        return Place(self.topic, self.progress.partition)

    def commit(self, done: Iterable[WorkItem[ItemT]]) -> Place:
        """What the group will have once the outputs of `done` are committed."""
        text = self.progress.bookmark(self.position, done).text()
        return Place(self.topic, self.progress.partition, self.position, text)

    def _bury(self, message: Message, offset: int, reason: str) -> None:
        self.limiter.count_bad(reason)
        if offset >= self.progress.committed:
            letter = DeadLetter(
                topic=self.topic,
                partition=self.progress.partition,
                offset=offset,
                key=_bytes(message.key()),
                value=message.value(),
                headers=_headers(message),
                timestamp=message.timestamp()[1],
            )
            self.dead.append((letter, reason))
            log.warning(
                "a record cannot be used and goes to dead-letters, with the reason",
                extra={"topic": self.topic, "partition": letter.partition, "offset": offset},
            )


def saved_at(place: Place) -> tuple[int, str]:
    return place.offset, strip_mark(place.metadata or "")


def offsets_of(place: Place) -> PartitionOffsets:
    """A commit as the ledger records it."""
    rebuild = Bookmark.parse(place.metadata, place.offset).rebuild
    return PartitionOffsets(partition=place.partition, committed=place.offset, rebuild=rebuild)


def _headers(message: Message) -> list[tuple[str, bytes]]:
    pairs: Any = message.headers() or ()
    return [(name, _bytes(value) or b"") for name, value in pairs]


def _bytes(value: Any) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
