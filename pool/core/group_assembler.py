"""Trajectories to groups: when groups open and close, and which trajectories are late.

Rules, each tested by name:

* A group is named by its prompt_uid and the offset in `steps` of its first record, since a prompt
  may come back in the next epoch.
* It closes when group_size trajectories have ended and none of them still expects a reward, or when
  a Decision closes it after its deadline. Closing one group never waits for another.
* A trajectory that began before the last group of its prompt closed is late; one that began after
  that opens the next group.
* A group that was posted as one record (`pool.core.scored_groups`) is closed when it is read.
* What a Decision names is done: when it is read again, it produces nothing.
* Groups of one prompt are decided in the order in which they closed. So the newest decided one says
  which trajectories are late, and a rebuild need not know at which record the others closed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pool.core import scored_groups
from pool.core.groups import (
    DEFAULT_RULES,
    Group,
    GroupRules,
    UngroupedTrajectory,
)
from pool.core.progress import Received
from pool.core.trajectories import (
    MEMORY,
    StrayReason,
    StrayRecord,
    Trajectory,
    TrajectoryAssembler,
    source_position,
)
from schemas import DecidedGroup, Feedback, Member, ScoredGroup, TrajectoryEnd
from schemas.records import Verdict

DECIDED_MEMORY = 1_000_000
"""Offsets for which a decided group is remembered, so that its stragglers are late and do not open
a new group. After a restart it comes from the ledger, not from reading the partition again."""
LATE = "it began before its group closed, or repeats a member of it"


class _ClosedGroup(NamedTuple):
    closed_at: int
    position: int


class GroupAssembler:
    """Open and undecided groups of one partition. Feed it `rewarded`, or `steps` with rewards in it.

    `decided` are the groups of earlier Decisions on this partition, each with the offset that was
    committed together with it, oldest first; `others` are the trajectories that Decisions name
    outside of groups. Trajectories for which `selects` is false are ignored.
    """

    def __init__(
        self,
        rules: GroupRules = DEFAULT_RULES,
        decided: Iterable[tuple[DecidedGroup, int]] = (),
        others: Iterable[Member] = (),
        memory: int = MEMORY,
        selects: Callable[[Trajectory], bool] = lambda trajectory: True,
    ) -> None:
        self._rules = rules
        self._selects = selects
        self._trajectories = TrajectoryAssembler(memory)
        self.memory = memory
        self._open: dict[str, Group] = {}
        self._undecided: dict[str, list[Group]] = {}
        """Closed groups of a prompt, in the order in which they closed."""
        self._last_closed: dict[str, _ClosedGroup] = {}
        """By prompt: where its newest decided group closed."""
        self._done: dict[str, list[Sequence[int]]] = {}
        """The offsets of every trajectory that a Decision names, by uid."""
        self._ends: list[tuple[int, int]] = []
        """Offset and source offset of Ends, without those before an End with a higher source offset."""
        for group, position in decided:
            self._remember(group.prompt_uid, _ClosedGroup(group.closed_at, position))
            self._mark_done(group.members)
        self._mark_done(others)

    def feed(self, received: Received) -> Group | UngroupedTrajectory | StrayRecord | None:
        if isinstance(received.record, ScoredGroup):
            return self._add_scored_group(received, received.record)
        item = self._trajectories.feed(received)
        if item is None:
            return None
        if isinstance(received.record, TrajectoryEnd):
            self._note_end(received, received.record)
        if isinstance(item, Trajectory):
            return self._add_trajectory(item, received.offset)
        if isinstance(received.record, Feedback):
            return self._add_feedback(item, received.record)
        return item

    def oldest_open(self) -> int | None:
        offsets = [group.first_offset for group in self._undecided_groups()]
        oldest = self._trajectories.oldest_open()
        return min(offsets if oldest is None else [*offsets, oldest], default=None)

    def forget_before(self, offset: int) -> None:
        self._trajectories.forget_before(offset)
        gone = [group for group in self._undecided_groups() if group.first_offset < offset]
        for group in gone:
            if group.closed_at is None:
                del self._open[group.prompt_uid]
            else:
                self._drop(group)

    def overdue(self, now: int) -> list[Group]:
        """Open groups whose deadline has passed, for a Decision to close. A group is left out while an
        earlier group of its prompt is undecided."""
        return [
            group
            for group in self._open.values()
            if group.prompt_uid not in self._undecided and group.deadline(self._rules) <= now
        ]

    def close(self, group: Group) -> None:
        """Closes an open group with the members it has; only for a Decision that is being made. A
        trajectory is late if it began before the newest End that was read since the group began,
        because a rebuild reads those same Ends."""
        newest = next(end for offset, end in self._ends if offset >= group.first_offset)
        self._close(group, max(newest + 1, group.last_source_offset()))

    def decide(self, group: Group, position: int) -> None:
        """A Decision on a closed group was committed together with the offset `position`."""
        assert group.closed_at is not None
        assert self._undecided[group.prompt_uid][0] is group, "an earlier group is undecided"
        self._drop(group)
        self._remember(group.prompt_uid, _ClosedGroup(group.closed_at, position))

    def give_up(
        self, before: int, verdict: Verdict, reason: str
    ) -> tuple[list[Group], list[Member]]:
        """Closes the open groups that began before the offset, for a Decision, and forgets the
        trajectories that began before it and have not ended. Returns the groups, and those trajectories
        with the verdict."""
        groups = [group for group in self.open_groups() if group.first_offset < before]
        for group in groups:
            self.close(group)
        unended = [
            Member(
                trajectory_uid=uid,
                verdict=verdict,
                reason=reason,
                offsets=[received.offset for received in records],
            )
            for uid, records in self._trajectories.open_trajectories()
            if records[0].offset < before
        ]
        self._trajectories.forget_before(before)
        return groups, unended

    def _drop(self, group: Group) -> None:
        waiting = self._undecided[group.prompt_uid]
        waiting.remove(group)
        if not waiting:
            del self._undecided[group.prompt_uid]

    def _mark_done(self, members: Iterable[Member]) -> None:
        for member in members:
            self._done.setdefault(member.trajectory_uid, []).append(member.offsets)

    def open_groups(self) -> list[Group]:
        return list(self._open.values())

    def has_undecided(self) -> bool:
        """Whether a closed group waits for its Decision."""
        return bool(self._undecided)

    def _undecided_groups(self) -> Iterable[Group]:
        """Open groups and closed ones that wait for their Decision."""
        return (*self._open.values(), *(g for groups in self._undecided.values() for g in groups))

    def _add_trajectory(
        self, trajectory: Trajectory, offset: int
    ) -> Group | UngroupedTrajectory | None:
        if any(offset in offsets for offsets in self._done.get(trajectory.uid, ())):
            return None
        if not self._selects(trajectory):
            return None
        if trajectory.end.channel != self._rules.channel:
            return UngroupedTrajectory(
                trajectory, "other_channel", f"its channel is {trajectory.end.channel}"
            )
        self._forget_old_groups(offset)
        if trajectory.began.offset < self._closed_at(trajectory.prompt_uid):
            return UngroupedTrajectory(trajectory, "late", LATE)
        group = self._open.get(trajectory.prompt_uid)
        if group is None:
            group = self._open[trajectory.prompt_uid] = self._new_group(trajectory)
        elif trajectory.uid in group.members:
            return UngroupedTrajectory(trajectory, "late", LATE)
        group.members[trajectory.uid] = trajectory
        return self._close_if_complete(group)

    def _closed_at(self, prompt_uid: str) -> int:
        """Where the newest closed group of a prompt closed, decided or not."""
        decided = self._last_closed.get(prompt_uid)
        waiting = (group.closed_at or 0 for group in self._undecided.get(prompt_uid, ()))
        return max(decided.closed_at if decided else 0, *waiting, 0)

    def _new_group(self, trajectory: Trajectory) -> Group:
        size = trajectory.group_size
        if size is None:
            size = self._rules.group_size
        return Group(trajectory.prompt_uid, trajectory.records[0].partition, size)

    def _add_feedback(self, stray: StrayRecord, feedback: Feedback) -> Group | StrayRecord | None:
        waiting = self._undecided.get(feedback.prompt_uid, ())
        # The newest first: a rebuild no longer has the decided ones, which are older.
        for group in (self._open.get(feedback.prompt_uid), *reversed(waiting)):
            if group is not None and feedback.trajectory_uid in group.members:
                if group.has_feedback(feedback):
                    return None
                group.feedback.append(stray.received)
                return self._close_if_complete(group)
        return StrayRecord(stray.received, "late", StrayReason.GROUP_NOT_OPEN)

    def _add_scored_group(
        self, received: Received, record: ScoredGroup
    ) -> Group | StrayRecord | None:
        trajectories = scored_groups.trajectories_of(received)
        if not trajectories:
            return StrayRecord(received, "invalid", StrayReason.NO_SCORES)
        if record.channel != self._rules.channel:
            return StrayRecord(received, "other_channel", StrayReason.OTHER_CHANNEL)
        if any(received.offset in offsets for offsets in self._done.get(trajectories[0].uid, ())):
            return None
        if not all(self._selects(trajectory) for trajectory in trajectories):
            return None
        group = Group(record.prompt_uid, received.partition, len(trajectories))
        group.members = {trajectory.uid: trajectory for trajectory in trajectories}
        group.closed_at = received.offset
        self._undecided.setdefault(group.prompt_uid, []).append(group)
        return group

    def _close_if_complete(self, group: Group) -> Group | None:
        if group.closed_at is not None or not group.is_complete():
            return None
        self._close(group, group.last_source_offset())
        return group

    def _close(self, group: Group, at: int) -> None:
        group.closed_at = at
        del self._open[group.prompt_uid]
        self._undecided.setdefault(group.prompt_uid, []).append(group)

    def _note_end(self, received: Received, end: TrajectoryEnd) -> None:
        at = source_position(received).offset
        while self._ends and self._ends[-1][1] <= at:
            self._ends.pop()
        self._ends.append((received.offset, at))
        group = self._open.get(end.prompt_uid)
        if group is not None and end.trajectory_uid in group.members:
            group.refused = max(group.refused, at + 1)

    def _remember(self, prompt_uid: str, closed: _ClosedGroup) -> None:
        self._forget_old_groups(closed.position)
        earlier = self._last_closed.pop(prompt_uid, None)
        newest = max(closed, earlier) if earlier else closed
        self._last_closed[prompt_uid] = _ClosedGroup(newest.closed_at, closed.position)

    def _forget_old_groups(self, offset: int) -> None:
        while self._last_closed:
            uid, closed = next(iter(self._last_closed.items()))
            if closed.position + DECIDED_MEMORY >= offset:
                return
            del self._last_closed[uid]
