"""One assigned partition of a consumer: its read position, and what the next transaction commits.

`Progress` knows items and offsets; this class connects it to Kafka's messages and commits.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic

from confluent_kafka import Message, TopicPartition

from pool.core.bookmark import MAX_TEXT, Bookmark, strip_mark
from pool.core.dead_letters import DeadLetter, PoisonLimiter
from pool.core.progress import Assembler, ItemT, Progress, Received, WorkItem
from schemas import Codec, PartitionOffsets, SchemaError
from servicekit.errors import OffsetLost
from servicekit.tracing import traceparent_of

log = logging.getLogger(__name__)

DELETED = b"steplog.deleted"
"""Key of the tombstone that replaces a record which was deleted on purpose."""
FULL_TEXT = MAX_TEXT // 2
"""A partition pauses when its bookmark is this long, so that one more batch still fits."""


@dataclass(slots=True, eq=False)
class AssignedPartition(Generic[ItemT]):
    topic: str
    progress: Progress[ItemT]
    saved: tuple[int, str]
    """Offset and bookmark of the group's last commit."""
    position: int
    """Offset of the next record to read."""
    limiter: PoisonLimiter = field(default_factory=PoisonLimiter)
    dead_letters: list[tuple[DeadLetter, str]] = field(default_factory=list)
    """Records that cannot be used, and why; the next transaction writes them to dead-letters."""
    paused: bool = False
    end: int | None = None
    """Offset at which reading ends; records at or after it are not read."""

    @classmethod
    def load(
        cls,
        commit: TopicPartition,
        low: int,
        assembler: Assembler[ItemT],
        accept_loss: bool = False,
    ) -> "AssignedPartition[ItemT]":
        """The partition as of the group's commit; `low` is the first offset that the log still holds.
        With `accept_loss`, state whose records are gone is given up."""
        committed = commit.offset if commit.offset >= 0 else low
        bookmark = Bookmark.parse(commit.metadata if commit.offset >= 0 else None, committed)
        if bookmark.rebuild < low and accept_loss:
            committed = max(committed, low)
            bookmark = Bookmark(committed, ())
        elif bookmark.rebuild < low:
            raise OffsetLost(
                f"Retention has deleted records that open state needs: "
                f"{commit.topic}[{commit.partition}] begins at offset {low}, the state at offset "
                f"{bookmark.rebuild}"
            )
        progress = Progress(commit.partition, assembler, committed, bookmark)
        start = max(low, min(progress.read_from(), committed))
        return cls(commit.topic, progress, saved_at(commit), start)

    def receive(self, message: Message, codec: Codec) -> list[WorkItem[ItemT]]:
        """Takes the next message and returns the work that it makes ready."""
        offset = message.offset()
        assert offset is not None
        if offset < self.position or (self.end is not None and offset >= self.end):
            return []
        self.position = offset + 1
        if message.value() is None:
            self.progress.deleted |= message.key() == DELETED
            return []  # a tombstone: its record is gone
        try:
            record = codec.decode(message.value())
        except SchemaError as error:
            self._add_dead_letter(message, offset, str(error))
            return []
        self.limiter.count_good()
        trace = traceparent_of(message.headers())
        return self.progress.feed(Received(record, self.progress.partition, offset, trace))

    def advance(self, position: int) -> list[WorkItem[ItemT]]:
        """Takes over a client's position, which may lie behind transaction markers and is negative
        before the first record."""
        if self.end is not None:
            position = min(position, self.end)
        self.position = max(self.position, position)
        return self.progress.reach(self.position)

    def is_full(self) -> bool:
        # Most items take two bytes of the bookmark; encode it only when the partition may be full.
        if len(self.progress.open) * 2 < FULL_TEXT // 4:
            return False
        return len(self.progress.bookmark(self.position).encode()) > FULL_TEXT

    def is_over(self) -> bool:
        return self.end is not None and self.position >= self.end

    def is_idle(self, done: Iterable[WorkItem[ItemT]] = ()) -> bool:
        """Whether nothing is open and no work waits besides `done`."""
        waiting = self.progress.open.keys() - {work.offset for work in done}
        return not waiting and self.progress.assembler.oldest_open() is None

    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.progress.partition)

    def commit(self, done: Iterable[WorkItem[ItemT]]) -> TopicPartition:
        """The commit that belongs to a transaction with the outputs of `done`."""
        text = self.progress.bookmark(self.position, done).encode()
        return TopicPartition(self.topic, self.progress.partition, self.position, text)

    def _add_dead_letter(self, message: Message, offset: int, reason: str) -> None:
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
            self.dead_letters.append((letter, reason))
            log.warning(
                "A record cannot be used and goes to dead-letters, with the reason.",
                extra={"topic": self.topic, "partition": letter.partition, "offset": offset},
            )


def saved_at(commit: TopicPartition) -> tuple[int, str]:
    return commit.offset, strip_mark(commit.metadata or "")


def offsets_of(commit: TopicPartition) -> PartitionOffsets:
    """A commit as the ledger records it."""
    rebuild = Bookmark.parse(commit.metadata, commit.offset).rebuild
    return PartitionOffsets(partition=commit.partition, committed=commit.offset, rebuild=rebuild)


def _headers(message: Message) -> list[tuple[str, bytes]]:
    pairs: Any = message.headers() or ()
    return [(name, _bytes(value) or b"") for name, value in pairs]


def _bytes(value: Any) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
