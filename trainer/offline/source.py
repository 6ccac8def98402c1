"""The closed groups of a fixed range of the log, in an order that does not depend on when it is read.

Nothing is read ahead of what is decided: a record that is read later, such as Feedback, never changes a
group that was decided before. So a run over a range makes the same Decisions however often it dies.

A Decision names offsets only when no closed group waits. Then what is open is all that a restart has
to rebuild, and it goes on there with the same records in the same order; what later Decisions name is
done, and nothing comes of it when it is read again.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import Self

from confluent_kafka import Message

from pool.connection import Connection
from pool.consumers.consumer import FinishedWork, Outputs
from pool.core.bookmark import Bookmark
from pool.core.groups import GroupAssembler
from pool.core.progress import Progress, WorkItem
from pool.core.trajectories import StrayRecord
from pool.producers.output import Output
from pool.readers.scan import OffsetRange, Scan, received
from pool.readers.time_order import merge_by_time
from schemas import PartitionOffsets, SchemaError, SkippedRange
from servicekit.errors import Fatal
from trainer.deciding.waiting import Item


class RangeSource:
    """`offsets` say where to go on; `kept` where the log begins; `write` commits outputs for good."""

    def __init__(
        self,
        connection: Connection,
        topic: str,
        spans: Mapping[int, OffsetRange],
        offsets: Mapping[int, PartitionOffsets],
        kept: Mapping[int, int],
        assemblers: Mapping[int, GroupAssembler],
        write: Callable[[Sequence[Output]], None],
    ) -> None:
        self.lost: list[SkippedRange] = []
        self.write = write
        self.is_over = False
        """All of it was read."""
        self._connection = connection
        self._codec = connection.codec()
        self._topic = topic
        self._spans = spans
        self._kept = kept
        self._assemblers = assemblers
        self._partitions: dict[int, Progress[Item]] = {
            number: Progress(number, assemblers[number], at.committed, Bookmark(at.rebuild, ()))
            for number, at in offsets.items()
        }
        self._positions = {number: at.committed for number, at in offsets.items()}
        self._works = self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._works.close()

    def read(self) -> tuple[int, int]:
        """How many offsets of how many."""
        done = [
            max(0, self._positions[number] - span.first) for number, span in self._spans.items()
        ]
        return sum(done), sum(span.end - span.first for span in self._spans.values())

    # Reading

    def poll(self, timeout: float) -> list[WorkItem[Item]]:
        """The next item; none if it takes longer than that, or there is none."""
        deadline = time.monotonic() + timeout
        for work in self._works:
            if work is not None:
                return [work]
            if time.monotonic() > deadline:
                return []
        self.is_over = True
        return []

    def _read(self) -> Generator[WorkItem[Item] | None, None, None]:
        before = {
            number: OffsetRange(max(self._kept[number], partition.read_from()), partition.committed)
            for number, partition in self._partitions.items()
        }
        with Scan(self._connection, self._topic, before) as scan:
            for message in scan:
                self._feed(message)
                yield None
        ahead = {}
        for number, partition in self._partitions.items():
            partition.reach(partition.committed)
            ahead[number] = OffsetRange(partition.committed, self._spans[number].end)
        with Scan(self._connection, self._topic, ahead) as scan:
            for message in merge_by_time(scan):
                work = self._feed(message)
                self._positions[message.partition() or 0] = (message.offset() or 0) + 1
                yield work
        self._positions.update({number: max(span) for number, span in ahead.items()})

    def _feed(self, message: Message) -> WorkItem[Item] | None:
        partition = self._partitions[message.partition() or 0]
        try:
            one = received(message, self._codec)
        except SchemaError as error:
            place = f"offset {message.offset()} of partition {partition.partition}"
            raise Fatal(f"{place} of {message.topic()} cannot be read: {error}") from error
        for work in partition.feed(one):
            if not isinstance(work.item, StrayRecord):
                return work
            partition.close([work])
        return None

    # Writing

    def finish(
        self,
        works: Sequence[WorkItem[Item]],
        outputs: Outputs,
        assignments: Sequence[Progress[Item]] = (),
    ) -> FinishedWork[Item]:
        """Writes the outputs at once."""
        made = outputs(self._offsets(works)) if callable(outputs) else outputs
        self.write(made)
        for work in works:
            work.assignment.close([work])
        return FinishedWork(works, outputs, assignments, "committed")

    def commit(self) -> bool:
        return True

    def _offsets(self, done: Sequence[WorkItem[Item]]) -> list[PartitionOffsets]:
        if any(assembler.has_undecided() for assembler in self._assemblers.values()):
            return []
        return [
            PartitionOffsets(
                partition=number,
                committed=self._positions[number],
                rebuild=partition.bookmark(self._positions[number], done).rebuild,
            )
            for number, partition in self._partitions.items()
        ]

    # As a consumer answers

    def assignment(self, partition: int) -> Progress[Item]:
        return self._partitions[partition]

    def position(self, partition: int) -> int:
        return self._positions[partition]

    def lags(self) -> dict[int, int]:
        """What is left of the range."""
        return {
            number: max(0, span.end - self._positions[number])
            for number, span in self._spans.items()
        }
