"""Judges closed groups: one verdict on the group and one on each of its members.

A member is trained only if its trajectory is usable, its logprobs can be compared with ours, and no
trained token is older than `max_age` versions. A group is judged twice by the same function, when it
is complete and when it is decided, because it may become too old in between.
"""

import msgspec

from pool.core.groups import TRAIN, Group, Judgement, judge_member
from pool.core.marks import PolicyMarks
from pool.core.rows import find_training_problem
from pool.core.trajectories import Trajectory, step_of
from schemas import DecidedGroup
from trainer.algorithm.settings import LossSettings
from trainer.data.credit import explain_no_variance
from trainer.decisions.settings import DecisionSettings


class Judge:
    """`loss` says which rewards are trained. `any_age` switches the age check off for offline runs,
    which train old data on purpose and mostly data of other runs."""

    def __init__(
        self,
        settings: DecisionSettings,
        marks: PolicyMarks,
        loss: LossSettings,
        any_age: bool = False,
    ) -> None:
        self._settings = settings
        self._rules = settings.group_rules()
        self._marks = marks
        self._loss = loss
        self._any_age = any_age
        self._accepted_runs = frozenset(settings.accept_runs)

    def judge(self, group: Group, version: int) -> DecidedGroup:
        """A batch with this group would make the successor of `version`."""
        decided = group.judge(self._rules, lambda g, member: self._judge_member(g, member, version))
        if decided.verdict != "train":
            return decided
        trained = [m.trajectory_uid for m in decided.members if m.verdict == "train"]
        if any(group.members[uid].advantages for uid in trained):
            return decided  # the environment supplied the advantages itself
        members = [group.members[uid] for uid in trained]
        reason = explain_no_variance(group, members, self._loss)
        if reason is None:
            return decided
        return msgspec.structs.replace(decided, verdict="no_variance", reason=reason)

    def _judge_member(self, group: Group, member: Trajectory, version: int) -> Judgement:
        judgement = judge_member(group, member)
        if judgement.verdict != "train":
            return judgement
        problem = find_training_problem(member)
        if problem is not None:
            return Judgement("invalid", problem)
        return self._judge_age(member, version)

    def _judge_age(self, member: Trajectory, version: int) -> Judgement:
        if self._any_age:
            return TRAIN
        allowed = self._settings.max_age
        judgement = self._marks.judge(member, version, allowed, self._accepted_runs)
        masks = self._settings.stale_tokens == "mask"
        if judgement.verdict == "stale" and masks and newest_version(member) >= version - allowed:
            return TRAIN
        return judgement

    def can_skip(self) -> bool:
        """Whether offsets alone show what is too old. Records of other accepted runs have no age."""
        return not self._accepted_runs


def newest_version(trajectory: Trajectory) -> int:
    """Version of the weights that sampled its youngest token."""
    return max(s.version for received in trajectory.steps for s in step_of(received).segments)
