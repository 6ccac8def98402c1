"""Which reward of a trajectory counts."""

import math
from typing import Any

import pytest

from pool.core.progress import Received
from pool.core.rewards import given_rewards
from schemas import Record
from tests.pool.records import at, end, feedback, note, step, trajectory_of

TWO = [step("a"), step("b", index=1)]


def on_step(reward: float, step_id: str, id: str = "") -> Record:
    return feedback(reward, step_id=step_id, id=id or f"{step_id} {reward}")


def counting(*records: Record, later: list[Received] | None = None) -> float | None:
    return given_rewards(trajectory_of(*records), later or []).counting


def test_without_any_reward_there_is_none() -> None:
    assert counting(*TWO, end(steps=2)) is None


def test_rewards_of_steps_are_summed_if_there_is_nothing_else() -> None:
    submitted = [step("a", reward=0.5), step("b", index=1, reward=0.25)]
    assert counting(*submitted, end(steps=2)) == 0.75


@pytest.mark.parametrize("pair", [(math.inf, -math.inf), (1e308, 1e308)])
def test_rewards_of_steps_that_have_no_sum_are_not_a_number(pair: tuple[float, float]) -> None:
    submitted = [step("a", reward=pair[0]), step("b", index=1, reward=pair[1])]
    assert math.isnan(counting(*submitted, end(steps=2)) or 0.0)


def test_feedback_on_steps_counts_before_the_end_and_after_it() -> None:
    rated = [TWO[0], on_step(0.5, "a"), TWO[1], end(steps=2)]
    assert counting(*rated) == 0.5
    assert counting(*rated, later=[at(9, on_step(0.25, "b"))]) == 0.75


def test_the_last_feedback_on_a_step_replaces_its_reward() -> None:
    submitted = step("a", reward=1.0)
    later = [at(8, on_step(0.25, "a")), at(9, on_step(0.75, "a"))]
    assert counting(submitted, end(), later=later[:1]) == 0.25
    assert counting(submitted, end(), later=list(reversed(later))) == 0.75


def test_a_copy_of_feedback_does_not_undo_a_newer_one() -> None:
    old, new = on_step(0.1, "a", id="old"), on_step(0.9, "a", id="new")
    assert counting(step("a"), old, new, end(), later=[at(9, old)]) == 0.9


@pytest.mark.parametrize(
    ("fields", "reward"), [({"reward": 2.0}, 2.0), ({"reward": 0.0}, 0.0), ({}, 0.5)]
)
def test_a_reward_in_the_end_outranks_those_of_steps(fields: dict[str, Any], reward: float) -> None:
    assert counting(step("a", reward=0.5), end(**fields)) == reward


def test_feedback_on_the_trajectory_outranks_everything() -> None:
    records = [step("a", reward=0.5), feedback(0.0), on_step(3.0, "a"), end(reward=1.0)]
    assert counting(*records) == 0.0


def test_a_sum_in_the_end_changes_with_later_feedback_on_a_step() -> None:
    summed = end(steps=2, reward=0.5, reward_from_steps=True)
    rated = [step("a", reward=0.5), TWO[1], summed]
    assert counting(*rated) == 0.5
    assert counting(*rated, later=[at(9, on_step(0.25, "b"))]) == 0.75


def test_orphans_and_unknown_steps_do_not_count() -> None:
    retried = [step("a", reward=8.0), note("a", False), step("b", index=1, reward=0.5)]
    later = [at(8, on_step(4.0, "a")), at(9, on_step(2.0, "no such step"))]
    assert counting(*retried, end(steps=2), later=later) == 0.5


@pytest.mark.parametrize("status", ["failed", "cancelled", "expired"])
def test_steps_of_a_trajectory_that_is_not_scored_have_no_sum(status: str) -> None:
    records = [step("a", reward=0.5), on_step(1.0, "a"), end(status=status)]
    assert counting(*records) is None
    assert counting(*records, later=[at(9, feedback(0.25))]) == 0.25
