"""Turn-level credit: an advantage for each turn of a trajectory, from the rewards of its Steps.

    A[i, k] = (O[i] - mean of O over the group) + (x[i, k] - mean of x[., k] over those with a turn k)

O is the outcome, the reward of the trajectory as a whole. x is the turn's own reward (`per_turn`) or
the sum of the rewards from that turn on (`return_to_go`). Both parts are in the unit of rewards, so one
spread normalizes their sum. In it a trajectory counts once, however many turns it has. So without
rewards of Steps, every turn has the advantage that `advantages.py` computes from outcomes.

A baseline may be anything that the actions of the turn cannot change. Members that ended before turn k
say nothing about what can still be earned there, so only those with such a turn are compared. A member
that is alone there keeps its part of the outcome.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.algorithm.advantages import (
    Floats,
    above_mean,
    leave_one_out_factor,
    normalizers,
)
from trainer.algorithm.choices import AdvantageMode, CreditMode


@dataclass(frozen=True, slots=True)
class MemberRewards:
    """The rewards of one trajectory, by where they were earned."""

    outcome: float
    turns: Floats
    """One per turn; 0 for a turn without a reward."""


def compute_turn_advantages(
    groups: Sequence[Sequence[MemberRewards]],
    credit: CreditMode,
    mode: AdvantageMode,
) -> list[list[Floats]]:
    """For each group and each of its members, one advantage per turn."""
    compared = [compare_turns(group, credit, mode == "loo") for group in groups]
    sizes = [np.array([_root_mean_square(turns) for turns in group]) for group in compared]
    spreads = normalizers(sizes, mode)
    return [
        [turns / spread for turns in group] for group, spread in zip(compared, spreads, strict=True)
    ]


def compare_turns(
    group: Sequence[MemberRewards], credit: CreditMode, leave_one_out: bool = False
) -> list[Floats]:
    """How much more than its group each member earned with each turn, in the unit of rewards."""
    outcomes = above_mean(np.array([member.outcome for member in group]))
    if leave_one_out:
        outcomes = outcomes * leave_one_out_factor(len(group))
    turns = _above_turn_means([_earned(member.turns, credit) for member in group], leave_one_out)
    return [outcome + own for outcome, own in zip(outcomes, turns, strict=True)]


def _earned(turns: Floats, credit: CreditMode) -> Floats:
    return np.cumsum(turns[::-1])[::-1] if credit == "return_to_go" else turns


def _above_turn_means(earned: Sequence[Floats], leave_one_out: bool) -> list[Floats]:
    above = [np.zeros(len(turns)) for turns in earned]
    for turn in range(max(map(len, earned), default=0)):
        present = [member for member, turns in enumerate(earned) if len(turns) > turn]
        values = above_mean(np.array([earned[member][turn] for member in present]))
        factor = leave_one_out_factor(len(present)) if leave_one_out else 1.0
        for member, value in zip(present, values, strict=True):
            above[member][turn] = value * factor
    return above


def _root_mean_square(turns: Floats) -> float:
    return float(np.sqrt(turns @ turns / max(len(turns), 1)))
