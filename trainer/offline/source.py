"""Reads closed groups from a fixed range of the log, in an order that is the same at every reading.

Nothing is read ahead of the batch that is being decided, so a later record, such as Feedback, never
changes a group that was decided before it. A run over a range therefore makes the same Decisions,
however often it is restarted.

A Decision records offsets only when no closed group waits. Open groups are then all that a restart has
to rebuild, and it continues there with the same records in the same order. Groups that later Decisions
name are done; they are ignored when they are read again.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import Self

from confluent_kafka import Message

from pool.connection import Connection
from pool.consumers.consumer import FinishedWork, Outputs
from pool.core.bookmark import Bookmark
from pool.core.group_assembler import GroupAssembler
from pool.core.progress import Progress, WorkItem
from pool.core.trajectories import StrayRecord
from pool.producers.output import Output
from pool.readers.scan import OffsetRange, Scan, decode_message
from pool.readers.time_order import merge_by_time
from schemas import PartitionOffsets, SchemaError, SkippedRange
from servicekit.errors import Fatal
from trainer.incarnation.source import GroupItem


class RangeSource:
    """`offsets` say where to continue, `log_starts` where the log begins after deletions. `write`
    commits outputs in a transaction."""

    def __init__(
        self,
        connection: Connection,
        topic: str,
        spans: Mapping[int, OffsetRange],
        offsets: Mapping[int, PartitionOffsets],
        log_starts: Mapping[int, int],
        assemblers: Mapping[int, GroupAssembler],
        write: Callable[[Sequence[Output]], None],
    ) -> None:
        self.lost: list[SkippedRange] = []
        self.write = write
        self.is_exhausted = False
        """Whether the whole range was read."""
        self._connection = connection
        self._codec = connection.codec()
        self._topic = topic
        self._spans = spans
        self._log_starts = log_starts
        self._assemblers = assemblers
        self._partitions: dict[int, Progress[GroupItem]] = {
            number: Progress(number, assemblers[number], o.committed, Bookmark(o.rebuild, ()))
            for number, o in offsets.items()
        }
        self._positions = {number: o.committed for number, o in offsets.items()}
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

    def range_progress(self) -> tuple[int, int]:
        """Offsets read, and offsets in all."""
        done = [
            max(0, self._positions[number] - span.first) for number, span in self._spans.items()
        ]
        return sum(done), sum(span.end - span.first for span in self._spans.values())

    # Reading

    def poll(self, timeout: float) -> list[WorkItem[GroupItem]]:
        """The next item; an empty list after the timeout or at the end of the range."""
        deadline = time.monotonic() + timeout
        for work in self._works:
            if work is not None:
                return [work]
            if time.monotonic() > deadline:
                return []
        self.is_exhausted = True
        return []

    def _read(self) -> Generator[WorkItem[GroupItem] | None, None, None]:
        rebuilt = {
            number: OffsetRange(
                max(self._log_starts[number], partition.read_from()), partition.committed
            )
            for number, partition in self._partitions.items()
        }
        with Scan(self._connection, self._topic, rebuilt) as scan:
            for message in scan:
                self._feed(message)
                yield None
        unread = {}
        for number, partition in self._partitions.items():
            partition.reach(partition.committed)
            unread[number] = OffsetRange(partition.committed, self._spans[number].end)
        with Scan(self._connection, self._topic, unread) as scan:
            for message in merge_by_time(scan):
                work = self._feed(message)
                self._positions[message.partition() or 0] = (message.offset() or 0) + 1
                yield work
        self._positions.update({number: max(span) for number, span in unread.items()})

    def _feed(self, message: Message) -> WorkItem[GroupItem] | None:
        partition = self._partitions[message.partition() or 0]
        try:
            record = decode_message(message, self._codec)
        except SchemaError as error:
            location = f"partition {partition.partition} of {message.topic()}"
            raise Fatal(
                f"the record at offset {message.offset()} in {location} cannot be decoded: {error}"
            ) from error
        for work in partition.feed(record):
            if not isinstance(work.item, StrayRecord):
                return work
            partition.close([work])
        return None

    # Writing

    def finish(
        self,
        works: Sequence[WorkItem[GroupItem]],
        outputs: Outputs,
        assignments: Sequence[Progress[GroupItem]] = (),
    ) -> FinishedWork[GroupItem]:
        """Writes the outputs at once."""
        self.write(outputs(self._offsets(works)) if callable(outputs) else outputs)
        for work in works:
            work.assignment.close([work])
        return FinishedWork(works, outputs, assignments, "committed")

    def commit(self) -> bool:
        return True

    def _offsets(self, done: Sequence[WorkItem[GroupItem]]) -> list[PartitionOffsets]:
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

    # The rest of the consumer's interface

    def assignment(self, partition: int) -> Progress[GroupItem]:
        return self._partitions[partition]

    def position(self, partition: int) -> int:
        return self._positions[partition]

    def lags(self) -> dict[int, int]:
        """Offsets of the range that are not read yet."""
        return {
            number: max(0, span.end - self._positions[number])
            for number, span in self._spans.items()
        }
