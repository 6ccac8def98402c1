"""Closed groups and verdicts between the log and the Decision that records them."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from pool.core.groups import Group
from pool.core.progress import Progress, WorkItem
from schemas import DecidedGroup, Member, SkippedRange
from trainer.incarnation.source import GroupItem


@dataclass(slots=True, eq=False)
class ReadyGroup:
    """A closed group that waits for its Decision."""

    group: Group
    assignment: Progress[GroupItem]
    work: WorkItem[GroupItem] | None = None
    """None for a group that was closed at its deadline, without a record."""
    since: float = field(default_factory=time.monotonic)
    """When the trainer saw that it was closed."""
    is_settled: bool = False
    """Its Decision is made and its assembler has forgotten it."""


JudgedGroup = tuple[ReadyGroup, DecidedGroup]


@dataclass(slots=True)
class PendingVerdicts:
    """What the next Decision records besides its batch."""

    groups: list[JudgedGroup] = field(default_factory=list)
    others: list[Member] = field(default_factory=list)
    """Verdicts on trajectories that belong to no group of the run."""
    works: list[WorkItem[GroupItem]] = field(default_factory=list)
    """The consumer's work items behind `others`."""
    assignments: list[Progress[GroupItem]] = field(default_factory=list)
    """Assignments that `others` depend on in addition to those of `works`."""
    skipped: list[SkippedRange] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.groups or self.others or self.skipped)

    def all_works(self) -> Iterator[WorkItem[GroupItem]]:
        yield from self.works
        yield from (ready.work for ready, _ in self.groups if ready.work is not None)

    def all_assignments(self) -> Iterator[Progress[GroupItem]]:
        yield from self.assignments
        yield from (ready.assignment for ready, _ in self.groups)
