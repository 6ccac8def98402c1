"""What becomes of a closed group: the verdict on it and on each of its members.

A member is trained only if its trajectory is usable, its logprobs can be compared with ours, and no
token that counts is older than `max_age` versions. The same function judges when a group is complete
and again when it is decided: between the two it may have become too old.
"""

from collections.abc import Callable

import msgspec

from pool.core.groups import TRAIN, Group, Judgement, judge_member
from pool.core.marks import PolicyMarks
from pool.core.rows import find_training_problem
from pool.core.trajectories import Trajectory, step_of
from schemas import DecidedGroup
from trainer.deciding.settings import DecidingSettings

EQUAL_REWARDS = 1e-6
"""Rewards that differ by no more teach nothing."""

UNASKED = (
    "it was posted through the Atropos API, and nobody knows how long it was in flight; "
    "--accept-scored trains it all the same"
)


class Judge:
    """`reward` gives what a member counts with, shaping included. `any_age`: as in an offline run, old
    data are meant; age counts versions of a run, and these are of others."""

    def __init__(
        self,
        settings: DecidingSettings,
        marks: PolicyMarks,
        reward: Callable[[Group, Trajectory], float],
        any_age: bool = False,
    ) -> None:
        self._settings = settings
        self._rules = settings.group_rules()
        self._marks = marks
        self._reward = reward
        self._any_age = any_age
        self._accepted = frozenset(settings.accept_runs)

    def judge(self, group: Group, version: int) -> DecidedGroup:
        """`version` is the newest: the group would train its successor."""
        decided = group.judge(self._rules, lambda g, member: self._member(g, member, version))
        if decided.verdict != "train":
            return decided
        used = [m.trajectory_uid for m in decided.members if m.verdict == "train"]
        if any(group.members[uid].advantages is not None for uid in used):
            return decided  # the environment says itself what each token is worth
        rewards = [self._reward(group, group.members[uid]) for uid in used]
        if max(rewards) - min(rewards) > EQUAL_REWARDS:
            return decided
        return msgspec.structs.replace(
            decided, verdict="no_variance", reason=f"all rewards are {rewards[0]:g}"
        )

    def _member(self, group: Group, member: Trajectory, version: int) -> Judgement:
        judgement = judge_member(group, member)
        if judgement.verdict != "train":
            return judgement
        if member.is_scored and not self._settings.accept_scored:
            return Judgement("invalid", UNASKED)
        problem = find_training_problem(member)
        if problem is not None:
            return Judgement("invalid", problem)
        return self._fresh(member, version)

    def _fresh(self, member: Trajectory, version: int) -> Judgement:
        if self._any_age:
            return TRAIN
        allowed = self._settings.max_age
        judgement = self._marks.judge(member, version, allowed, self._accepted)
        masks = self._settings.stale_tokens == "mask"
        if judgement.verdict == "stale" and masks and newest_version(member) >= version - allowed:
            return TRAIN
        return judgement

    def skips(self) -> bool:
        """Whether offsets alone tell what is too old: records of other runs have no age."""
        return not self._accepted


def newest_version(trajectory: Trajectory) -> int:
    """Of the weights that sampled its youngest token."""
    return max(s.version for received in trajectory.steps for s in step_of(received).segments)
