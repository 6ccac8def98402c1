"""What an incarnation reads from: a source of assembled groups that can also write to the log."""

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from pool.consumers.consumer import FinishedWork, Outputs
from pool.core.groups import Group, UngroupedTrajectory
from pool.core.progress import Progress, WorkItem
from pool.core.trajectories import StrayRecord
from pool.producers.output import Output
from schemas import SkippedRange

GroupItem = Group | UngroupedTrajectory | StrayRecord
"""What a group assembler emits."""


class GroupSource(Protocol):
    """Delivers closed groups and writes records. In a live run this is a member of the consumer group
    (`StatefulConsumer`), in an offline run a reader of a fixed range (`RangeSource`)."""

    lost: list[SkippedRange]

    def __enter__(self) -> object: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def poll(self, timeout: float) -> list[WorkItem[GroupItem]]: ...

    def finish(
        self,
        works: Sequence[WorkItem[GroupItem]],
        outputs: Outputs,
        assignments: Sequence[Progress[GroupItem]] = (),
    ) -> FinishedWork[GroupItem]: ...

    def commit(self) -> bool: ...

    def write(self, outputs: Sequence[Output]) -> None: ...

    def assignment(self, partition: int) -> Progress[GroupItem] | None: ...

    def position(self, partition: int) -> int | None: ...

    def lags(self) -> dict[int, int]: ...
