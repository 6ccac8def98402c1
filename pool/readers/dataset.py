"""The log as a data set: the complete trajectories of a selection.

A trajectory belongs to the range in which it ended. It may have begun before the range, so reading
starts a little earlier; the few trajectories that began even earlier are left out and counted.
"""

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from pool.connection import Connection
from pool.core.progress import Received
from pool.core.scored_groups import trajectories_of
from pool.core.trajectories import MEMORY, StrayReason, StrayRecord, Trajectory, TrajectoryAssembler
from pool.readers.scan import Scan, decode_message
from pool.readers.selection import Selection, SelectionSettings, find_ranges
from pool.topics import STEPS
from schemas import Codec, SchemaError, ScoredGroup, TrajectoryEnd

LOOK_BACK = 20_000
"""How many offsets before a range of `steps` reading starts: agents work in parallel, and one may
take long. Rewards are written trajectory by trajectory, so there an assembler's memory is enough."""


class Dataset:
    """Iterate over it once; `scan` has the progress."""

    def __init__(
        self,
        connection: Connection,
        topic: str,
        settings: SelectionSettings,
        channel: str | None = None,
        codec: Codec | None = None,
    ) -> None:
        self.missed = 0
        """How many trajectories ended in the range but began too long before it."""
        self.unreadable = 0
        """How many records cannot be decoded; the reward worker has written them to dead-letters."""
        self.ranges = find_ranges(connection, topic, settings)
        back = LOOK_BACK if topic == STEPS else MEMORY
        self.scan = Scan(connection, topic, self.ranges.extended_back(back))
        self._selection = Selection(settings, channel)
        self._codec = codec or connection.codec()
        self._assemblers = {number: TrajectoryAssembler() for number in self.ranges.by_partition}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.scan.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[Trajectory]:
        return (item for item in self.items() if isinstance(item, Trajectory))

    def items(self) -> Iterator[Trajectory | StrayRecord]:
        """Trajectories and stray records, such as Feedback that came after its trajectory had ended."""
        for one in self._records():
            item = self._assemblers[one.partition].feed(one)
            if item is None or one.offset < self.ranges.by_partition[one.partition].first:
                continue
            if began_too_early(item):
                self.missed += 1
            elif self._selection.matches_item(item):
                yield item

    def posted_trajectories(self, stray: StrayRecord) -> list[Trajectory]:
        """The selected trajectories of a posted group; none for other stray records."""
        if not isinstance(stray.received.record, ScoredGroup):
            return []
        return [
            member for member in trajectories_of(stray.received) if self._selection.matches(member)
        ]

    def _records(self) -> Iterator[Received]:
        for message in self.scan:
            if message.value() is None:
                continue
            try:
                one = decode_message(message, self._codec)
            except SchemaError:
                self.unreadable += 1
            else:
                yield one


def began_too_early(item: Trajectory | StrayRecord) -> bool:
    """Whether the item is an End whose Steps lie before the offset at which reading started."""
    return (
        isinstance(item, StrayRecord)
        and isinstance(item.received.record, TrajectoryEnd)
        and item.reason is StrayReason.TRAJECTORY_NOT_OPEN
    )
