"""Trajectories to groups: the trajectories of one prompt that are compared with each other.

Rules, each tested by name:

* A group is named by its prompt_uid and the offset in `steps` of its first record, since a prompt
  may come back in the next epoch.
* It closes when group_size trajectories have ended and none of them still expects a reward, or when
  a decision closes it after its deadline. Closing one group never waits for another.
* A trajectory that began before its group closed is late; one that began after opens the next.
* Feedback counts until the group is decided; the last by offset wins.
* Failed and cancelled members leave the group and are never scored 0. It is usable with at least
  max(2, ceil(quorum * group_size)) members, else it is `too_few`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pool.progress import Received
from pool.trajectories import Stray, Trajectory, TrajectoryAssembler, source, step_of
from schemas import DecidedGroup, Feedback, Member
from schemas.records import Verdict

DECIDED_MEMORY = 1_000_000
"""Offsets for which a decided group is remembered, so that its stragglers are late and do not open
a group of their own. It comes back from the ledger, not from reading the partition again."""


class GroupRules(NamedTuple):
    """What a group needs, where its Steps do not say it."""

    channel: str = "train"
    group_size: int = 8
    quorum: float = 0.5
    deadline: float = 3600.0
    """Seconds after the first record of a group, for Steps that carry no deadline."""


class Judgement(NamedTuple):
    verdict: Verdict
    reason: str = ""


TRAIN = Judgement("train")
DEFAULT_RULES = GroupRules()


@dataclass(slots=True)
class Group:
    """The trajectories of one prompt. It is closed when `closed_at` is set."""

    prompt_uid: str
    partition: int
    size: int
    members: dict[str, Trajectory] = field(default_factory=dict)
    feedback: list[Received] = field(default_factory=list)
    """Rewards that came after their trajectory had ended."""
    closed_at: int | None = None
    """Offset in `steps`: who began before it is late."""

    @property
    def first_offset(self) -> int:
        """Of its oldest record, in the topic that it was read from."""
        return min(member.first_offset for member in self.members.values())

    @property
    def id(self) -> tuple[str, int]:
        return self.prompt_uid, min(m.began.offset for m in self.members.values())

    def is_complete(self) -> bool:
        return len(self.members) >= self.size and not any(
            member.end.reward_expected and self.reward(member) is None
            for member in self.members.values()
        )

    def reward(self, member: Trajectory) -> float | None:
        """The last Feedback on the whole trajectory, else what its End says."""
        late = (received.record for received in (*member.feedback, *self.feedback))
        given = [
            feedback.reward
            for feedback in late
            if isinstance(feedback, Feedback)
            and feedback.trajectory_uid == member.uid
            and feedback.step_id is None
        ]
        return given[-1] if given else member.end.reward

    def last_source(self) -> int:
        ends = (member.ended.offset for member in self.members.values())
        return max(*ends, *(source(received).offset for received in self.feedback), 0)

    def deadline(self, rules: GroupRules) -> int:
        """In milliseconds since the epoch: its members' own, else counted from its first record."""
        steps = [step_of(received) for m in self.members.values() for received in m.steps]
        own = [step.deadline for step in steps if step.deadline is not None]
        born = min((step.created_at for step in steps), default=0)
        return max(own) if own else born + int(rules.deadline * 1000)

    def judge(
        self, rules: GroupRules, judge_member: Callable[["Group", Trajectory], Judgement]
    ) -> DecidedGroup:
        """The group's entry in a Decision: a verdict on it and on each of its members."""
        assert self.closed_at is not None, "only a closed group can be judged"
        judgements = [(member, judge_member(self, member)) for member in self.members.values()]
        usable = sum(judgement.verdict == "train" for _, judgement in judgements)
        wanted = max(2, math.ceil(rules.quorum * self.size))
        verdict = TRAIN
        if usable < wanted:
            verdict = Judgement(
                "too_few", f"{usable} of {self.size} are usable, {wanted} are needed"
            )
        return DecidedGroup(
            prompt_uid=self.prompt_uid,
            partition=self.partition,
            first_offset=self.id[1],
            closed_at=self.closed_at,
            verdict=verdict.verdict,
            reason=verdict.reason,
            members=[_member(member, judgement) for member, judgement in judgements],
        )


def usable(group: Group, member: Trajectory) -> Judgement:
    """Whether a member can be trained, as far as the trajectory itself tells."""
    status = member.end.status
    if status == "expired":
        return Judgement("expired", "its deadline passed")
    if status in ("failed", "cancelled"):
        return Judgement("invalid", f"{status}: {member.end.reason or 'no reason given'}")
    if member.problem is not None:
        return Judgement("invalid", member.problem)
    if not member.steps:
        return Judgement("invalid", "it has no Steps")
    if group.reward(member) is None:
        return Judgement("invalid", "it has no reward")
    return TRAIN


@dataclass(frozen=True, slots=True)
class Outsider:
    """A whole trajectory that belongs to no group, with the reason."""

    trajectory: Trajectory
    verdict: Verdict
    reason: str

    @property
    def first_offset(self) -> int:
        return self.trajectory.first_offset

    def member(self) -> Member:
        return _member(self.trajectory, Judgement(self.verdict, self.reason))


def _member(trajectory: Trajectory, judgement: Judgement) -> Member:
    return Member(
        trajectory_uid=trajectory.uid,
        verdict=judgement.verdict,
        reason=judgement.reason,
        offsets=[received.offset for received in trajectory.records],
    )


class _Closed(NamedTuple):
    closed_at: int
    position: int


class GroupAssembler:
    """Open and undecided groups of one partition. Feed it `rewarded`, or `steps` with rewards in it.

    `decided` are the groups of earlier Decisions on this partition, each with the offset that was
    committed together with it, oldest first.
    """

    def __init__(
        self, rules: GroupRules = DEFAULT_RULES, decided: Iterable[tuple[DecidedGroup, int]] = ()
    ) -> None:
        self._rules = rules
        self._trajectories = TrajectoryAssembler()
        self.memory = self._trajectories.memory
        self._open: dict[str, Group] = {}
        self._undecided: dict[str, list[Group]] = {}
        self._closed: dict[str, _Closed] = {}
        """Where the newest closed group of a prompt closed."""
        self._head = 0
        for group, position in decided:
            self._remember(group.prompt_uid, _Closed(group.closed_at, position))

    def feed(self, received: Received) -> Group | Outsider | Stray | None:
        item = self._trajectories.feed(received)
        if isinstance(item, Trajectory):
            return self._trajectory(item, received.offset)
        if isinstance(item, Stray) and isinstance(item.received.record, Feedback):
            return self._feedback(item, item.received.record)
        return item

    def oldest_open(self) -> int | None:
        offsets = [group.first_offset for group in self._needed()]
        oldest = self._trajectories.oldest_open()
        return min(offsets if oldest is None else [*offsets, oldest], default=None)

    def forget_before(self, offset: int) -> None:
        self._trajectories.forget_before(offset)
        gone = [group for group in self._needed() if group.first_offset < offset]
        for group in gone:
            if group.closed_at is None:
                del self._open[group.prompt_uid]
            else:
                self._undecided[group.prompt_uid].remove(group)

    def overdue(self, now: int) -> list[Group]:
        """Open groups whose deadline has passed; for a decision to close."""
        return [g for g in self._open.values() if g.deadline(self._rules) <= now]

    def close(self, group: Group, position: int) -> None:
        """Closes an open group with what it has, at the consumer's position; only while a decision
        is made."""
        self._close(group, self._head + 1, position)

    def decide(self, group: Group, position: int) -> None:
        """A Decision on a closed group was committed together with the offset `position`."""
        assert group.closed_at is not None
        waiting = self._undecided[group.prompt_uid]
        waiting.remove(group)
        if not waiting:
            del self._undecided[group.prompt_uid]
        self._remember(group.prompt_uid, _Closed(group.closed_at, position))

    def open_groups(self) -> Sequence[Group]:
        return list(self._open.values())

    def _needed(self) -> Iterable[Group]:
        return (*self._open.values(), *(g for groups in self._undecided.values() for g in groups))

    def _trajectory(self, trajectory: Trajectory, offset: int) -> Group | Outsider | None:
        self._head = max(self._head, trajectory.ended.offset)
        if trajectory.end.channel != self._rules.channel:
            return Outsider(trajectory, "other_channel", f"its channel is {trajectory.end.channel}")
        self._forget_closed(offset)
        closed = self._closed.get(trajectory.prompt_uid)
        if closed is not None and trajectory.began.offset < closed.closed_at:
            return Outsider(trajectory, "late", "it began before its group closed")
        group = self._open.get(trajectory.prompt_uid)
        if group is None:
            group = self._open[trajectory.prompt_uid] = self._new_group(trajectory)
        elif trajectory.uid in group.members:
            return Outsider(trajectory, "late", "its group has a trajectory of that uid")
        group.members[trajectory.uid] = trajectory
        return self._close_if_complete(group, offset)

    def _new_group(self, trajectory: Trajectory) -> Group:
        said = [trajectory.end.group_size, *(step_of(r).group_size for r in trajectory.steps)]
        size = next((size for size in said if size is not None), self._rules.group_size)
        return Group(trajectory.prompt_uid, trajectory.records[0].partition, size)

    def _feedback(self, stray: Stray, feedback: Feedback) -> Group | Stray | None:
        for group in (
            self._open.get(feedback.prompt_uid),
            *self._undecided.get(feedback.prompt_uid, ()),
        ):
            if group is not None and feedback.trajectory_uid in group.members:
                group.feedback.append(stray.received)
                return self._close_if_complete(group, stray.received.offset)
        return Stray(stray.received, "late", "its group is decided, or never was")

    def _close_if_complete(self, group: Group, offset: int) -> Group | None:
        if group.closed_at is not None or not group.is_complete():
            return None
        self._close(group, group.last_source(), offset)
        return group

    def _close(self, group: Group, at: int, position: int) -> None:
        group.closed_at = at
        del self._open[group.prompt_uid]
        self._undecided.setdefault(group.prompt_uid, []).append(group)
        self._remember(group.prompt_uid, _Closed(at, position))

    def _remember(self, prompt_uid: str, closed: _Closed) -> None:
        earlier = self._closed.pop(prompt_uid, None)
        newest = max(closed, earlier) if earlier else closed
        self._closed[prompt_uid] = _Closed(newest.closed_at, closed.position)

    def _forget_closed(self, offset: int) -> None:
        while self._closed:
            uid, closed = next(iter(self._closed.items()))
            if closed.position + DECIDED_MEMORY >= offset:
                return
            del self._closed[uid]
