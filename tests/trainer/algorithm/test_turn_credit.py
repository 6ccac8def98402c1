"""Advantages of turns, compared with numbers that were worked out by hand.

The group: A has the outcome 1 and turns worth 0.2 and 0.4; B has 0 and 0, 0.4 and -0.3; C has 0.5 and
0.1. The mean outcome is 0.5, so the outcomes lie 0.5 above, 0.5 below and on it.

per_turn compares (0.2, 0, 0.1) at the first turn: 0.1 above, 0.1 below and on the mean of 0.1. At the
second A and B are equal, and at the third B is alone.

return_to_go compares what is still to come. A: 0.6, 0.4; B: 0.1, 0.1, -0.3; C: 0.1. At the first turn
the mean is 0.8 / 3, at the second 0.25, and at the third B is alone.
"""

from math import sqrt
from typing import get_args

import numpy as np
import pytest

from trainer.algorithm.advantages import Floats, compute_advantages
from trainer.algorithm.choices import AdvantageMode, CreditMode
from trainer.algorithm.turn_credit import MemberRewards, compute_turn_advantages

MODES: tuple[AdvantageMode, ...] = get_args(AdvantageMode)
TURN_LEVEL: tuple[CreditMode, ...] = ("return_to_go", "per_turn")


def member(outcome: float, *turns: float) -> MemberRewards:
    return MemberRewards(outcome, np.array(turns, np.float64))


GROUP = [member(1.0, 0.2, 0.4), member(0.0, 0.0, 0.4, -0.3), member(0.5, 0.1)]
PER_TURN = [[0.6, 0.5], [-0.6, -0.5, -0.5], [0.0]]
TO_GO = [
    [0.5 + 0.6 - 0.8 / 3, 0.5 + 0.15],
    [-0.5 + 0.1 - 0.8 / 3, -0.5 - 0.15, -0.5],
    [0.1 - 0.8 / 3],
]


def check(found: list[Floats], expected: list[list[float]]) -> None:
    assert [len(turns) for turns in found] == [len(turns) for turns in expected]
    for turns, numbers in zip(found, expected, strict=True):
        assert turns == pytest.approx(numbers, abs=1e-12)


def test_each_turn_is_compared_with_the_same_turn_of_the_group() -> None:
    (found,) = compute_turn_advantages([GROUP], "per_turn", "none")
    check(found, PER_TURN)


def test_the_return_from_a_turn_on_is_compared_with_that_of_the_group() -> None:
    (found,) = compute_turn_advantages([GROUP], "return_to_go", "none")
    check(found, TO_GO)


def test_loo_leaves_a_member_out_of_the_mean_of_outcomes_and_of_each_turn() -> None:
    (found,) = compute_turn_advantages([GROUP], "per_turn", "loo")
    first = [1.0 - 0.25 + 0.2 - 0.05, 0.4 - 0.4 + 1.0 - 0.25]
    second = [0.0 - 0.75 + 0.0 - 0.15, 0.0 - 0.75, 0.0 - 0.75]
    check(found, [first, second, [0.5 - 0.5 + 0.1 - 0.1]])


def test_a_trajectory_counts_once_in_the_spread_however_many_turns_it_has() -> None:
    squares = (0.36 + 0.25) / 2 + (0.36 + 0.25 + 0.25) / 3 + 0.0
    other = [member(4.0, 0.0), member(0.0, 0.0)]  # 2 above and 2 below
    found, _ = compute_turn_advantages([GROUP, other], "per_turn", "group_std")
    in_group = sqrt(squares / 2) + 1e-6
    check(found, [[value / in_group for value in turns] for turns in PER_TURN])
    found, last = compute_turn_advantages([GROUP, other], "per_turn", "batch_std")
    in_batch = sqrt((squares + 4 + 4) / 5) + 1e-6
    check(found, [[value / in_batch for value in turns] for turns in PER_TURN])
    check(last, [[2 / in_batch], [-2 / in_batch]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("credit", TURN_LEVEL)
def test_without_rewards_of_steps_every_turn_has_the_advantage_of_its_outcome(
    credit: CreditMode, mode: AdvantageMode
) -> None:
    groups = [
        [member(1.0, 0, 0, 0), member(0.0, 0), member(0.25, 0, 0)],
        [member(3.0, 0), member(1.0, 0, 0)],
    ]
    outcomes = [np.array([each.outcome for each in group]) for group in groups]
    expected = compute_advantages(outcomes, mode)
    found = compute_turn_advantages(groups, credit, mode)
    for of_group, advantages in zip(found, expected, strict=True):
        for turns, advantage in zip(of_group, advantages, strict=True):
            assert turns == pytest.approx(np.full(len(turns), advantage), rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("credit", TURN_LEVEL)
def test_a_member_alone_gets_nothing(credit: CreditMode, mode: AdvantageMode) -> None:
    (found,) = compute_turn_advantages([[member(7.0, 1.0, 2.0)]], credit, mode)
    check(found, [[0.0, 0.0]])
    assert compute_turn_advantages([], credit, mode) == []
