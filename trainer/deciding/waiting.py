"""Closed groups between the log and a decision."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from pool.core.groups import Group, UngroupedTrajectory
from pool.core.progress import Progress, WorkItem
from pool.core.trajectories import StrayRecord
from schemas import DecidedGroup, Member, SkippedRange

Item = Group | UngroupedTrajectory | StrayRecord


@dataclass(slots=True, eq=False)
class Ready:
    """A closed group. One that a decision closed at its deadline has no work."""

    group: Group
    assignment: "Progress[Item]"
    work: WorkItem[Item] | None = None
    since: float = field(default_factory=time.monotonic)
    """When it was seen to be closed."""
    settled: bool = False
    """Its assembler has forgotten it: the decision is made."""


@dataclass(slots=True)
class Verdicts:
    """What the next Decision says, apart from its batch."""

    groups: list[tuple[Ready, DecidedGroup]] = field(default_factory=list)
    others: list[Member] = field(default_factory=list)
    works: list[WorkItem[Item]] = field(default_factory=list)
    """Whose fate `others` tells."""
    assignments: list["Progress[Item]"] = field(default_factory=list)
    """On which `others` depend besides."""
    skipped: list[SkippedRange] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.groups or self.others or self.skipped)

    def all_works(self) -> Iterator[WorkItem[Item]]:
        yield from self.works
        yield from (ready.work for ready, _ in self.groups if ready.work is not None)

    def all_assignments(self) -> Iterator["Progress[Item]"]:
        yield from self.assignments
        yield from (ready.assignment for ready, _ in self.groups)
