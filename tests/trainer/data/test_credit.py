"""Turn-level credit of trajectories: which rewards reach which tokens."""

from typing import Any

import numpy as np
import pytest

from pool.core.groups import Group
from schemas import Record, StepAdvantages
from schemas.packing import pack_logprobs
from tests.pool.records import at, end, feedback, group_of, note, step
from tests.trainer.data.test_batch import batch_of
from trainer.algorithm.settings import LossSettings
from trainer.data.batch import Batch
from trainer.data.batch_metrics import batch_metrics
from trainer.data.credit import explain_no_variance
from trainer.data.digest import digest

PER_TURN = LossSettings(credit="per_turn", advantage="none")
TO_GO = LossSettings(credit="return_to_go", advantage="none")
OUTCOME = LossSettings(advantage="none")
TURN = (4, 5)
"""The answer of every turn."""


def attempt(uid: str, outcome: float | None, *rewards: float | None, **fields: Any) -> list[Record]:
    """A conversation: every prompt is what was said before and one id of the user."""
    records: list[Record] = []
    ids: tuple[int, ...] = (1, 2, 3)
    for turn, reward in enumerate(rewards):
        name = f"{uid}-{turn}"
        records.append(step(name, uid, index=turn, ids=ids, response=TURN, reward=reward))
        ids = (*ids, *TURN, 9)
    return [*records, end(uid, steps=len(rewards), reward=outcome, **fields)]


def by_hand() -> Group:
    """The group of `tests.trainer.algorithm.test_turn_credit`, where it is worked out."""
    a, b, c = ("a", 1.0, 0.2, 0.4), ("b", 0.0, None, 0.4, -0.3), ("c", 0.5, 0.1)
    return group_of(*attempt(*a), *attempt(*b), *attempt(*c), size=3)


def of_tokens(batch: Batch, sample: int = 0) -> list[list[float]]:
    """The advantage of every trained token, row by row."""
    trained: list[list[float]] = []
    for row in batch.samples[sample].rows:
        assert row.advantages is not None
        assert np.isnan(row.advantages[~row.trainable]).all(), "context has no advantage"
        trained.append([round(float(value), 6) for value in row.advantages[row.trainable]])
    return trained


def test_every_token_has_the_advantage_of_its_turn() -> None:
    batch = batch_of(by_hand(), loss=PER_TURN)
    assert of_tokens(batch, 0) == [[0.6, 0.6, 0.5, 0.5]]
    assert of_tokens(batch, 1) == [[-0.6, -0.6, -0.5, -0.5, -0.5, -0.5]]
    assert of_tokens(batch, 2) == [[0.0, 0.0]]
    batch = batch_of(by_hand(), loss=TO_GO)
    assert of_tokens(batch, 0) == [[0.833333, 0.833333, 0.65, 0.65]]
    assert of_tokens(batch, 1) == [[-0.666667, -0.666667, -0.65, -0.65, -0.5, -0.5]]
    assert of_tokens(batch, 2) == [[-0.166667, -0.166667]]


def test_by_default_only_the_outcome_counts_and_the_batch_is_what_it_always_was() -> None:
    batch = batch_of(by_hand())
    assert batch.advantages == [value / (np.sqrt(0.5 / 3) + 1e-6) for value in (0.5, -0.5, 0.0)]
    assert all(row.advantages is None for sample in batch.samples for row in sample.rows)
    # As computed by the release before there was turn-level credit.
    assert digest(batch) == "59da8c6a87fc334866c35754bed148fefc9f5da1cbbc2a463e06b04dddaf22b6"


def test_another_credit_is_another_batch() -> None:
    losses = [OUTCOME, PER_TURN, TO_GO]
    assert len({digest(batch_of(by_hand(), loss=loss)) for loss in losses}) == 3


def test_a_reward_that_is_the_sum_of_its_turns_is_credited_once() -> None:
    group = group_of(*attempt("a", None, 1.0, 0.0), *attempt("b", None, 0.0, 0.5))
    assert batch_of(group, loss=OUTCOME).advantages == [0.25, -0.25]
    assert of_tokens(batch_of(group, loss=PER_TURN)) == [[0.5, 0.5, -0.25, -0.25]]
    assert of_tokens(batch_of(group, loss=TO_GO)) == [[0.25, 0.25, -0.25, -0.25]]


def test_feedback_on_an_answer_counts_for_its_turn_also_after_the_end() -> None:
    rated = feedback(2.0, "a", step_id="a-1")
    group = group_of(*attempt("a", 1.0, 0.0, 0.0), *attempt("b", 1.0, 0.0, 0.0))
    group.feedback.append(at(50, rated))
    assert of_tokens(batch_of(group, loss=PER_TURN)) == [[0.0, 0.0, 1.0, 1.0]]
    assert of_tokens(batch_of(group, loss=TO_GO)) == [[1.0, 1.0, 1.0, 1.0]]


def test_an_answer_that_was_not_delivered_is_no_turn() -> None:
    lost = step("a-lost", "a", index=0, ids=(1, 2, 3), response=(7, 7), reward=5.0)
    later = [
        step("a-0", "a", index=1, response=TURN, reward=1.0),
        end("a", steps=2, reward=0.0),
    ]
    group = group_of(lost, note("a-lost", False, "a"), *later, *attempt("b", 0.0, 0.0))
    assert of_tokens(batch_of(group, loss=PER_TURN)) == [[0.5, 0.5]]


def test_sub_agents_are_turns_in_the_order_in_which_they_were_called() -> None:
    """Each opens a row of its own; its tokens are trained once, with its own advantage."""
    main = step("a-0", "a", index=0, response=TURN, reward=0.0)
    sub = step("a-1", "a", index=1, ids=(70, 71), response=(72,), reward=1.0)
    last = step("a-2", "a", index=2, ids=(1, 2, 3, *TURN, 72), response=TURN, reward=0.0)
    group = group_of(main, sub, last, end("a", steps=3, reward=0.0), *attempt("b", 0.0, 0, 0, 0))
    assert of_tokens(batch_of(group, loss=PER_TURN)) == [[0.0, 0.0, 0.0, 0.0], [0.5]]
    assert of_tokens(batch_of(group, loss=TO_GO)) == [[0.5, 0.5, 0.0, 0.0], [0.5]]


def test_advantages_of_the_environment_take_precedence() -> None:
    own = [StepAdvantages(step_id="a-1", values=pack_logprobs([7.0, 8.0]))]
    group = group_of(*attempt("a", 1.0, 1.0, 0.0, advantages=own), *attempt("b", 0.0, 0.0, 0.0))
    assert of_tokens(batch_of(group, loss=PER_TURN)) == [[1.0, 1.0, 7.0, 8.0]]


def test_a_truncated_member_stays_in_the_baseline_of_its_turns() -> None:
    cut = attempt("b", 0.0, 1.0, 0.0, status="truncated")
    group = group_of(*attempt("a", 0.0, 0.0, 0.0), *cut)
    loss = LossSettings(credit="per_turn", advantage="none", mask_truncated=True)
    batch = batch_of(group, loss=loss)
    assert of_tokens(batch) == [[-0.5, -0.5, 0.0, 0.0]]
    assert not any(row.trainable.any() for row in batch.samples[1].rows)


def test_overlong_shaping_lowers_the_outcome() -> None:
    group = group_of(*attempt("a", 1.0, 0.0), *attempt("b", 1.0, 0.0, 0.0))
    shaped = {"overlong_max": 4, "overlong_buffer": 2, "advantage": "none"}
    batch = batch_of(group, loss=LossSettings(credit="return_to_go", **shaped))
    assert [sample.reward for sample in batch.samples] == [1.0, 0.0]
    assert of_tokens(batch) == [[0.5, 0.5]]


def test_the_spread_within_trajectories_is_measured() -> None:
    found = batch_metrics(batch_of(by_hand(), loss=PER_TURN))
    squares = [(0.36 + 0.25) / 2, (0.36 + 0.25 + 0.25) / 3, 0.0]
    variances = [0.05**2, 0.36 / 3 + 0.5 / 3 - (1.6 / 3) ** 2, 0.0]
    assert found["advantage_std"] == pytest.approx(np.sqrt(sum(squares) / 3))
    assert found["turn_advantage_std"] == pytest.approx(np.sqrt(sum(variances) / 3))
    assert found["turns_mean"] == 2
    assert "turn_advantage_std" not in batch_metrics(batch_of(by_hand()))


def variance(group: Group, loss: LossSettings) -> str | None:
    return explain_no_variance(group, list(group.members.values()), loss)


def test_a_group_has_variance_if_what_is_trained_differs() -> None:
    only_turns = group_of(*attempt("a", 1.0, 0.0, 1.0), *attempt("b", 1.0, 0.0, 0.0))
    assert variance(only_turns, OUTCOME) == "all rewards are 1"
    assert variance(only_turns, PER_TURN) is None
    assert variance(only_turns, TO_GO) is None
    # The sums differ, but nothing is compared with the second turn.
    only_sums = group_of(*attempt("a", None, 0.5, 1.0), *attempt("b", None, 0.5))
    assert variance(only_sums, OUTCOME) is None
    assert variance(only_sums, PER_TURN) == "at every turn, all members earned the same"
    assert variance(only_sums, TO_GO) is None


def test_turns_that_are_not_trained_give_a_group_no_variance() -> None:
    def records(uid: str, reward: float) -> list[Record]:
        tool = step(f"{uid}-0", uid, reward=reward, not_trainable="a forced tool")
        answer = step(f"{uid}-1", uid, index=1, ids=(1, 2, 3, 4, 5, 9), reward=0.0)
        return [tool, answer, end(uid, steps=2, reward=1.0)]

    group = group_of(*records("a", 1.0), *records("b", 0.0))
    assert variance(group, PER_TURN) == "at every turn, all members earned the same"
