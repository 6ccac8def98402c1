from math import sqrt
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.advantages import Floats, compute_advantages
from trainer.algorithm.choices import AdvantageMode

MODES: tuple[AdvantageMode, ...] = get_args(AdvantageMode)
GROUPS = st.lists(
    st.lists(st.floats(-10, 10), min_size=1, max_size=6).map(np.array), min_size=1, max_size=5
)


def groups(*rewards: list[float]) -> list[Floats]:
    return [np.array(group, np.float64) for group in rewards]


def test_none_is_what_lies_above_the_mean() -> None:
    (found,) = compute_advantages(groups([1.0, 0.0, 0.0, 1.0, 3.0]), "none")
    assert found == pytest.approx([0, -1, -1, 0, 2])


def test_loo_leaves_a_member_out_of_its_own_baseline() -> None:
    (found,) = compute_advantages(groups([1.0, 0.0, 5.0]), "loo")
    assert found == pytest.approx([1 - 2.5, 0 - 3, 5 - 0.5])


def test_group_std_is_that_of_a_sample() -> None:
    first, second = compute_advantages(groups([1.0, 0.0, 2.0], [10.0, 30.0]), "group_std")
    assert first == pytest.approx(np.array([0, -1, 1]) / (1 + 1e-6))
    assert second == pytest.approx(np.array([-10, 10]) / (sqrt(200) + 1e-6))


def test_batch_std_is_one_for_all_groups() -> None:
    first, second = compute_advantages(groups([1.0, 0.0], [4.0, 0.0, 2.0, 2.0]), "batch_std")
    spread = sqrt((0.25 + 0.25 + 4 + 4) / 6) + 1e-6
    assert first == pytest.approx(np.array([0.5, -0.5]) / spread)
    assert second == pytest.approx(np.array([2, -2, 0, 0]) / spread)


@pytest.mark.parametrize("mode", MODES)
def test_a_member_alone_gets_nothing_and_changes_nothing(mode: AdvantageMode) -> None:
    alone, *others = compute_advantages(groups([7.0], [1.0, 0.0], [0.0, 3.0]), mode)
    assert alone.tolist() == [0.0]
    assert [list(group) for group in others] == [
        list(group) for group in compute_advantages(groups([1.0, 0.0], [0.0, 3.0]), mode)
    ]


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_member_leaves_the_others_as_in_a_smaller_group(mode: AdvantageMode) -> None:
    usable = [reward for reward in (1.0, None, 0.0, 1.0) if reward is not None]
    (found,) = compute_advantages(groups(usable), mode)
    (smaller,) = compute_advantages(groups([1.0, 0.0, 1.0]), mode)
    assert found.tolist() == smaller.tolist()
    assert found[0] > 0, "a failure scored 0 would have lowered the mean"


@pytest.mark.parametrize("mode", MODES)
def test_no_groups_no_advantages(mode: AdvantageMode) -> None:
    assert compute_advantages([], mode) == []


@pytest.mark.parametrize("mode", MODES)
@given(rewards=GROUPS)
def test_a_group_sums_to_0(mode: AdvantageMode, rewards: list[Floats]) -> None:
    found = compute_advantages(rewards, mode)
    assert [len(group) for group in found] == [len(group) for group in rewards]
    for group in found:
        assert np.isfinite(group).all()
        assert group.sum() == pytest.approx(0, abs=1e-6)


@given(rewards=GROUPS, scale=st.floats(0.5, 100))
def test_batch_std_does_not_know_the_unit_of_rewards(rewards: list[Floats], scale: float) -> None:
    spread = max(float(np.ptp(group)) for group in rewards)
    if spread < 0.1:
        return
    found = compute_advantages(rewards, "batch_std")
    scaled = compute_advantages([group * scale for group in rewards], "batch_std")
    assert np.concatenate(scaled) == pytest.approx(np.concatenate(found), rel=1e-3, abs=1e-6)
