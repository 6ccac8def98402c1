"""How far one partition has been processed, apart from Kafka.

A consumer that waits for whole trajectories or groups holds state between records. `Progress` feeds
records to an assembler that holds this state and hands out the items which they complete. At any
moment `bookmark()` says how to get the same state back after a crash:

* Records are read again from the rebuild offset (and a little before it, see `Assembler.memory`) up
  to the committed offset. Items completed there are handed out again only if the bookmark lists
  them; all others had their outputs committed together with that offset.
* From the committed offset on the partition is live. What was listed is handed out then, not
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
    """A record and where it was read."""

    record: Record
    partition: int
    offset: int
    trace: str = ""
    """The traceparent that it came with."""
    header: bytes = b""
    """What its value began with, where it was kept: `schemas.codec.mark` tells the schema from it."""


class AssembledItem(Protocol):
    """Something whole that an assembler made of records."""

    @property
    def first_offset(self) -> int:
        """Of the oldest record that it is made of."""


ItemT = TypeVar("ItemT", bound=AssembledItem)
ItemT_co = TypeVar("ItemT_co", bound=AssembledItem, covariant=True)


class Assembler(Protocol[ItemT_co]):
    """The open state of one partition: a function of the records fed to it and of nothing else."""

    memory: int
    """For how many offsets something closed is remembered, to know what comes late."""

    def feed(self, received: Received) -> ItemT_co | None:
        """Takes the next record; gives the item that it completes."""

    def oldest_open(self) -> int | None:
        """Offset of the oldest record that the open state needs."""

    def forget_before(self, offset: int) -> None:
        """Drops open state that began before the offset."""


@dataclass(eq=False, slots=True)
class WorkItem(Generic[ItemT]):
    """An item that waits for its output, under the assignment in which it was read."""

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
    """Complete, output not committed yet; by the offset that names the item."""
    warm: bool = False
    """The rebuild offset is reached: what is closed is remembered, and nothing is open yet."""
    live: bool = False
    """The committed offset is reached."""
    deleted: bool = False
    """A record was deleted on purpose, so an item that was pending may be gone with it."""

    def read_from(self) -> int:
        return max(0, self.start.rebuild - self.assembler.memory)

    def feed(self, received: Received) -> list[WorkItem[ItemT]]:
        """Takes the next record; gives the work that it makes ready."""
        ready = [] if self.live else self._rebuild(received.offset)
        item = self.assembler.feed(received)
        if item is not None and (self.live or received.offset in self.start.pending):
            work = self.open[received.offset] = WorkItem(item, received.offset, self)
            if self.live:
                ready.append(work)
        return ready

    def reach(self, position: int) -> list[WorkItem[ItemT]]:
        """Nothing lies between the last record and `position`; gives the work that this makes
        ready."""
        return [] if self.live else self._rebuild(position)

    def _rebuild(self, offset: int) -> list[WorkItem[ItemT]]:
        if offset >= self.start.rebuild and not self.warm:
            # What began before was closed and done when the bookmark was written.
            self.warm = True
            self.assembler.forget_before(self.start.rebuild)
        return self._go_live() if offset >= self.committed else []

    def _go_live(self) -> list[WorkItem[ItemT]]:
        self.live = True
        missing = [offset for offset in self.start.pending if offset not in self.open]
        if missing and not self.deleted:
            raise Fatal(
                f"partition {self.partition} holds no item at offset {missing[0]}, which was pending "
                "when its offset was committed; was the topic or the version of this program changed?"
            )
        return list(self.open.values())

    def bookmark(self, position: int, done: Iterable[WorkItem[ItemT]] = ()) -> Bookmark:
        """How to come back to `position` once the outputs of `done` are committed."""
        offsets = {work.offset for work in done if work.assignment is self}
        waiting = sorted(offset for offset in self.open if offset not in offsets)
        needed = [self.open[offset].item.first_offset for offset in waiting]
        oldest = self.assembler.oldest_open()
        if oldest is not None:
            needed.append(oldest)
        return Bookmark(min(needed, default=position), tuple(waiting))

    def close(self, done: Iterable[WorkItem[ItemT]]) -> None:
        """The outputs of these items are committed."""
        for work in done:
            del self.open[work.offset]
