"""How far one partition has been processed, independent of Kafka.

A consumer that waits for complete trajectories or groups holds state between records. `Progress`
feeds records to an assembler, which holds this state, and hands out the items that they complete. At
any moment `bookmark()` says how to rebuild the same state after a crash:

* Records are read again from the rebuild offset (and a little before it, see `Assembler.memory`) up
  to the committed offset. Items completed there are handed out again only if the bookmark lists
  them; all others had their outputs committed together with that offset.
* From the committed offset on, the partition is live. The listed items are handed out then and not
  before: records read again after an item was complete may still change it, as Feedback does.

So each item's output is committed once, whatever the moment of the crash, as long as outputs and
bookmark are committed together.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from pool.core.bookmark import Bookmark
from schemas import Record
from servicekit.errors import Fatal


class Received(NamedTuple):
    """A record and the position at which it was read."""

    record: Record
    partition: int
    offset: int
    trace: str = ""
    """The traceparent in its Kafka headers."""
    header: bytes = b""
    """The first bytes of its value, if the reader kept them; `schemas.codec.writer_schema_id` reads the
    schema's id from them."""


class AssembledItem(Protocol):
    """Something complete that an assembler built from records."""

    @property
    def first_offset(self) -> int:
        """Offset of the oldest record that it is built from."""


ItemT = TypeVar("ItemT", bound=AssembledItem)
ItemT_co = TypeVar("ItemT_co", bound=AssembledItem, covariant=True)


class Assembler(Protocol[ItemT_co]):
    """The open state of one partition: a function of nothing but the records fed to it."""

    memory: int
    """For how many offsets a closed item is remembered, to recognize late records."""

    def feed(self, received: Received) -> ItemT_co | None:
        """Takes the next record and returns the item that it completes."""

    def oldest_open(self) -> int | None:
        """Offset of the oldest record that the open state needs."""

    def forget_before(self, offset: int) -> None:
        """Drops open state that began before the offset."""


@dataclass(eq=False, slots=True)
class WorkItem(Generic[ItemT]):
    """A complete item that waits for its output, and the assignment under which it was read."""

    item: ItemT
    offset: int
    assignment: "Progress[ItemT]"


@dataclass(eq=False, slots=True)
class Progress(Generic[ItemT]):
    """One assignment of one partition. A new assignment is a new object, so work of an earlier one
    is recognised by identity and dropped."""

    partition: int
    assembler: Assembler[ItemT]
    committed: int
    start: Bookmark
    open: dict[int, WorkItem[ItemT]] = field(default_factory=dict)
    """Items that are complete and whose output is not committed yet, by the offset that names them."""
    warm: bool = False
    """Whether the rebuild offset is reached: closed items are remembered, and nothing is open yet."""
    live: bool = False
    """Whether the committed offset is reached."""
    deleted: bool = False
    """Whether a record was deleted on purpose, so that a pending item may be gone with it."""

    def read_from(self) -> int:
        return max(0, self.start.rebuild - self.assembler.memory)

    def feed(self, received: Received) -> list[WorkItem[ItemT]]:
        """Takes the next record and returns the work that it makes ready."""
        ready = [] if self.live else self._rebuild(received.offset)
        item = self.assembler.feed(received)
        if item is not None and (self.live or received.offset in self.start.pending):
            work = self.open[received.offset] = WorkItem(item, received.offset, self)
            if self.live:
                ready.append(work)
        return ready

    def reach(self, position: int) -> list[WorkItem[ItemT]]:
        """There is no record between the last one and `position`; returns the work that this makes
        ready."""
        return [] if self.live else self._rebuild(position)

    def _rebuild(self, offset: int) -> list[WorkItem[ItemT]]:
        if offset >= self.start.rebuild and not self.warm:
            # Everything that began earlier was closed and done when the bookmark was written.
            self.warm = True
            self.assembler.forget_before(self.start.rebuild)
        return self._go_live() if offset >= self.committed else []

    def _go_live(self) -> list[WorkItem[ItemT]]:
        self.live = True
        missing = [offset for offset in self.start.pending if offset not in self.open]
        if missing and not self.deleted:
            raise Fatal(
                f"Partition {self.partition} has no item at offset {missing[0]}, which was pending at "
                "the last commit. Was the topic changed, or another version of steplog used?"
            )
        return list(self.open.values())

    def bookmark(self, position: int, done: Iterable[WorkItem[ItemT]] = ()) -> Bookmark:
        """How to rebuild the state at `position` once the outputs of `done` are committed."""
        offsets = {work.offset for work in done if work.assignment is self}
        waiting = sorted(offset for offset in self.open if offset not in offsets)
        needed = [self.open[offset].item.first_offset for offset in waiting]
        oldest = self.assembler.oldest_open()
        if oldest is not None:
            needed.append(oldest)
        return Bookmark(min(needed, default=position), tuple(waiting))

    def close(self, done: Iterable[WorkItem[ItemT]]) -> None:
        """Removes items whose outputs are committed."""
        for work in done:
            del self.open[work.offset]
