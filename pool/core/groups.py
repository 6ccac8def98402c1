"""Groups: the trajectories of one prompt that are compared with each other, and when they are usable.

* Failed and cancelled members leave the group and are never scored 0. It is usable with at least
  max(2, ceil(quorum * group_size)) members, else it is `too_few`.
* Feedback counts until the group is decided (`pool.core.rewards`).

`pool.core.group_assembler` has the rules by which groups open and close.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pool.core.progress import Received
from pool.core.rewards import (
    SCORED_STATUSES,
    GivenRewards,
    feedback_of,
    given_rewards,
    step_rewards,
)
from pool.core.trajectories import (
    Trajectory,
    source_position,
    step_of,
)
from schemas import DecidedGroup, Feedback, Member
from schemas.records import Verdict


class GroupRules(NamedTuple):
    """How groups are formed. The size and deadline hold where Steps do not state their own."""

    channel: str = "train"
    group_size: int = 8
    quorum: float = 0.5
    deadline: float = 3600.0
    """Seconds after the first record of a group, for Steps that carry no deadline."""


class TurnRewards(NamedTuple):
    """The rewards of a member, each where it was earned. A turn is a Step that is no orphan."""

    outcome: float
    """Of the trajectory as a whole; 0 if its reward is the sum of the turns'."""
    turns: dict[str, float]
    """By step_id, in the order of the Steps; 0 for a turn without a reward."""


class Judgement(NamedTuple):
    verdict: Verdict
    reason: str = ""


def required_members(quorum: float, size: int) -> int:
    """How many usable members a group of this size needs: its quorum, and at least two."""
    return max(2, math.ceil(round(quorum * size, 6)))  # 0.28 * 25 is a little more than 7


TRAIN = Judgement("train")
LARGEST_REWARD = 3e38
"""Advantages are float32; one reward that is too large, infinite or NaN would spoil its whole batch."""
DEFAULT_RULES = GroupRules()


@dataclass(slots=True)
class Group:
    """The trajectories of one prompt. The group is closed once `closed_at` is set."""

    prompt_uid: str
    partition: int
    size: int
    members: dict[str, Trajectory] = field(default_factory=dict)
    feedback: list[Received] = field(default_factory=list)
    """Rewards that came after their trajectory had ended."""
    refused: int = 0
    """Offset in `steps` behind the last End that repeated a member's uid. The repeated trajectory is
    late, also after the group has closed."""
    closed_at: int | None = None
    """Offset in `steps`: trajectories of the prompt that began before it are late."""

    @property
    def first_offset(self) -> int:
        """Offset of its oldest record, in the topic that it was read from."""
        return min(member.first_offset for member in self.members.values())

    @property
    def id(self) -> tuple[str, int]:
        return self.prompt_uid, min(m.began.offset for m in self.members.values())

    def is_complete(self) -> bool:
        return len(self.members) >= self.size and not any(
            map(self._awaits_reward, self.members.values())
        )

    def _awaits_reward(self, member: Trajectory) -> bool:
        """Whether a reward that its agent announced is still to come. No reward can make a member
        usable that failed, was cancelled or expired."""
        is_expected = member.end.reward_expected and member.status in SCORED_STATUSES
        return is_expected and not self._given_rewards(member).is_complete

    def reward(self, member: Trajectory) -> float | None:
        """The reward with which it counts."""
        return self._given_rewards(member).counting

    def turn_rewards(self, member: Trajectory) -> TurnRewards:
        """The rewards of the whole and of every turn, with Feedback that came after its end."""
        outcome = self._given_rewards(member).outcome
        turns = step_rewards(member, self.later_feedback(member))
        return TurnRewards(outcome or 0.0, {uid: reward or 0.0 for uid, reward in turns.items()})

    def _given_rewards(self, member: Trajectory) -> GivenRewards:
        return given_rewards(member, self.later_feedback(member))

    def later_feedback(self, member: Trajectory) -> list[Received]:
        """The Feedback that came after the member had ended."""
        return [r for r in self.feedback if feedback_of(r).trajectory_uid == member.uid]

    def has_feedback(self, feedback: Feedback) -> bool:
        """Whether this is a copy of Feedback that the group already has."""
        existing = (*self.members[feedback.trajectory_uid].feedback, *self.feedback)
        return any(feedback_of(r).feedback_id == feedback.feedback_id for r in existing)

    def last_source_offset(self) -> int:
        """Offset in `steps` of its newest record."""
        ends = (member.ended.offset for member in self.members.values())
        later = (source_position(received).offset for received in self.feedback)
        return max(*ends, *later, self.refused)

    def deadline(self, rules: GroupRules) -> int:
        """In milliseconds since the epoch: the latest that its Steps state, else counted from its first
        record."""
        steps = [step_of(received) for m in self.members.values() for received in m.steps]
        deadlines = [step.deadline for step in steps if step.deadline is not None]
        ends = [member.end for member in self.members.values()]
        created_at = min(record.created_at for record in steps or ends)
        return max(deadlines) if deadlines else created_at + int(rules.deadline * 1000)

    def judge(
        self, rules: GroupRules, judge_member: Callable[["Group", Trajectory], Judgement]
    ) -> DecidedGroup:
        """The group's entry in a Decision: a verdict on it and on each of its members."""
        assert self.closed_at is not None, "only a closed group can be judged"
        judgements = [(member, judge_member(self, member)) for member in self.members.values()]
        usable = sum(judgement.verdict == "train" for _, judgement in judgements)
        required = required_members(rules.quorum, self.size)
        verdict = TRAIN
        if usable < required:
            verdict = Judgement(
                "too_few", f"{usable} of {self.size} are usable, {required} are needed"
            )
        return DecidedGroup(
            prompt_uid=self.prompt_uid,
            partition=self.partition,
            first_offset=self.id[1],
            closed_at=self.closed_at,
            verdict=verdict.verdict,
            reason=verdict.reason,
            members=[
                _member(member, judgement, self.later_feedback(member))
                for member, judgement in judgements
            ],
        )


def judge_member(group: Group, member: Trajectory) -> Judgement:
    """Whether a member can be trained, judged by the trajectory alone, without its age."""
    status = member.status
    if status == "expired":
        return Judgement("expired", "its deadline passed")
    if status in ("failed", "cancelled"):
        return Judgement("invalid", f"{status}: {member.end.reason or 'no reason given'}")
    if member.problem is not None:
        return Judgement("invalid", member.problem)
    if not member.steps:
        return Judgement("invalid", "it has no Steps")
    reward = group.reward(member)
    if reward is None:
        return Judgement("invalid", "it has no reward")
    for number in (reward, *group.turn_rewards(member).turns.values()):
        if not abs(number) <= LARGEST_REWARD:
            return Judgement("invalid", f"its reward, or that of a Step, is {number:g}")
    return TRAIN


@dataclass(frozen=True, slots=True)
class UngroupedTrajectory:
    """A complete trajectory that belongs to no group, with the reason."""

    trajectory: Trajectory
    verdict: Verdict
    reason: str

    @property
    def first_offset(self) -> int:
        return self.trajectory.first_offset

    def member(self) -> Member:
        return _member(self.trajectory, Judgement(self.verdict, self.reason))


def _member(trajectory: Trajectory, judgement: Judgement, later: Sequence[Received] = ()) -> Member:
    return Member(
        trajectory_uid=trajectory.uid,
        verdict=judgement.verdict,
        reason=judgement.reason,
        offsets=[received.offset for received in (*trajectory.records, *later)],
    )
