"""Credits the members of groups with their rewards: what each advantage is computed from.

The judge asks here whether a group has anything to learn from, and the batch takes its advantages from
here, so that a group is trained exactly if something in it would be.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pool.core.groups import Group
from pool.core.rows import count_sampled_tokens, target_step_ids
from pool.core.trajectories import Trajectory
from trainer.algorithm.advantages import Floats, compute_advantages
from trainer.algorithm.settings import LossSettings
from trainer.algorithm.shaping import shape_reward
from trainer.algorithm.turn_credit import MemberRewards, compare_turns, compute_turn_advantages

EQUAL_REWARDS = 1e-6
"""Rewards that differ by no more than this count as equal; such a group has no gradient."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What a member of a batch is trained with."""

    reward: float
    """After overlong shaping."""
    advantage: float
    """Of the whole trajectory; with turn-level credit the mean over its turns."""
    turns: dict[str, float] = field(default_factory=dict)
    """With turn-level credit, the advantage of every turn by step_id."""

    def packed_turns(self) -> dict[str, bytes]:
        """The advantages of turns in the form of those that an environment gives."""
        return {uid: np.array([value], "<f4").tobytes() for uid, value in self.turns.items()}


def assign_credit(groups: Sequence[Group], loss: LossSettings) -> list[list[Credit]]:
    """For each group, the credit of its members."""
    if loss.credit == "outcome":
        return _credit_outcomes(groups, loss)
    return _credit_turns(groups, loss)


def explain_no_variance(
    group: Group, members: Sequence[Trajectory], loss: LossSettings
) -> str | None:
    """Why these members of a group have nothing to learn from each other; None if they do."""
    if loss.credit == "outcome":
        rewards = [shaped_reward(group, member, loss) for member in members]
        is_equal = max(rewards) - min(rewards) <= EQUAL_REWARDS
        return f"all rewards are {rewards[0]:g}" if is_equal else None
    compared = compare_turns([_member_rewards(group, m, loss) for m in members], loss.credit)
    trained = (turns[_is_target(group, m)] for m, turns in zip(members, compared, strict=True))
    if any((np.abs(turns) > EQUAL_REWARDS).any() for turns in trained):
        return None
    return "at every turn, all members earned the same"


def shaped_reward(group: Group, member: Trajectory, loss: LossSettings) -> float:
    """The reward of a member after overlong shaping."""
    reward = group.reward(member)
    assert reward is not None, "a member without a reward is never trained"
    return shape_reward(loss, reward, count_sampled_tokens(member))


def _credit_outcomes(groups: Sequence[Group], loss: LossSettings) -> list[list[Credit]]:
    rewards: list[Floats] = [
        np.array([shaped_reward(group, member, loss) for member in group.members.values()])
        for group in groups
    ]
    advantages = compute_advantages(rewards, loss.advantage)
    return [
        [Credit(float(reward), float(value)) for reward, value in zip(*group, strict=True)]
        for group in zip(rewards, advantages, strict=True)
    ]


def _credit_turns(groups: Sequence[Group], loss: LossSettings) -> list[list[Credit]]:
    members = [[(group, member) for member in group.members.values()] for group in groups]
    rewards = [[_member_rewards(*each, loss) for each in group] for group in members]
    advantages = compute_turn_advantages(rewards, loss.credit, loss.advantage)
    return [
        [_turn_credit(*each, loss, turns) for each, turns in zip(*group, strict=True)]
        for group in zip(members, advantages, strict=True)
    ]


def _turn_credit(group: Group, member: Trajectory, loss: LossSettings, turns: Floats) -> Credit:
    by_step = zip(group.turn_rewards(member).turns, map(float, turns), strict=True)
    return Credit(shaped_reward(group, member, loss), float(turns.mean()), dict(by_step))


def _member_rewards(group: Group, member: Trajectory, loss: LossSettings) -> MemberRewards:
    given = group.turn_rewards(member)
    outcome = shape_reward(loss, given.outcome, count_sampled_tokens(member))
    return MemberRewards(outcome, np.array(list(given.turns.values()), np.float64))


def _is_target(group: Group, member: Trajectory) -> list[bool]:
    """For every turn of a member, whether its tokens are trained."""
    targets = set(target_step_ids(member))
    return [step_id in targets for step_id in group.turn_rewards(member).turns]
