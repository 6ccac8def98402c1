import math
from typing import Any

import msgspec
import numpy as np
import pytest

from pool.core.rows import Row, build_rows, find_training_problem
from pool.core.trajectories import Trajectory
from schemas import Record, Segment, Step, StepAdvantages
from schemas.packing import pack_logprobs
from tests.pool.records import child, end, note, sampled, step, trajectory_of
from trainer.data.sample import Sample


def trajectory(*records: Record) -> Trajectory:
    steps = sum(isinstance(record, Step) for record in records)
    return trajectory_of(*records, end(steps=steps))


def ids(row: Row) -> list[int]:
    return [int(one) for one in row.ids]


def trained(row: Row) -> list[int]:
    return [int(one) for one in row.ids[row.trainable]]


def test_a_step_that_extends_the_row_joins_it_and_what_lies_between_is_context() -> None:
    (row,) = build_rows(
        trajectory(
            step("a", ids=[1, 2], response=[3, 4]),
            step("b", index=1, ids=[1, 2, 3, 4, 50, 51], response=[5]),
        )
    )
    assert ids(row) == [1, 2, 3, 4, 50, 51, 5]
    assert trained(row) == [3, 4, 5]
    assert row.behaviour.tolist() == [0, 0, -0.5, -0.5, 0, 0, -0.5]
    assert row.versions.tolist() == [-1, -1, 0, 0, -1, -1, 0]
    assert row.temperatures.tolist() == [1] * 7


def test_rewritten_history_opens_another_row() -> None:
    rows = build_rows(
        trajectory(
            step("a", ids=[1, 2], response=[3, 4]),
            step("b", index=1, ids=[1, 2, 3, 99, 5], response=[6]),
        )
    )
    assert [ids(row) for row in rows] == [[1, 2, 3, 4], [1, 2, 3, 99, 5, 6]]
    assert [trained(row) for row in rows] == [[3, 4], [6]]


def test_sub_agents_that_take_turns_each_keep_their_row() -> None:
    rows = build_rows(
        trajectory(
            step("a1", ids=[1], response=[2]),
            step("b1", index=1, ids=[10], response=[11]),
            step("a2", index=2, ids=[1, 2, 3], response=[4]),
            step("b2", index=3, ids=[10, 11, 12], response=[13]),
        )
    )
    assert [ids(row) for row in rows] == [[1, 2, 3, 4], [10, 11, 12, 13]]


def test_a_step_joins_the_longest_row_that_its_prompt_begins_with() -> None:
    rows = build_rows(
        trajectory(
            step("a", ids=[1], response=[2]),
            step("b", index=1, ids=[1], response=[2, 3]),
            step("c", index=2, ids=[1, 2, 3, 7], response=[8]),
        )
    )
    assert [ids(row) for row in rows] == [[1, 2], [1, 2, 3, 7, 8]]


def test_what_is_not_trainable_is_context_where_a_later_prompt_has_it() -> None:
    (row,) = build_rows(
        trajectory(
            step("a", ids=[1], response=[2]),
            step("b", index=1, ids=[1, 2, 3], response=[4], not_trainable="top_p"),
            step("c", index=2, ids=[1, 2, 3, 4, 5], response=[6]),
        )
    )
    assert ids(row) == [1, 2, 3, 4, 5, 6]
    assert trained(row) == [2, 6]


def test_an_orphan_is_not_trained() -> None:
    rows = build_rows(
        trajectory(
            step("a", ids=[1], response=[2], request_hash=b"h"),
            step("b", index=1, ids=[1], response=[3], request_hash=b"h"),
            note("b", False),
            step("c", index=2, ids=[1, 2, 5], response=[6]),
        )
    )
    assert [trained(row) for row in rows] == [[2, 6]]


def test_the_first_id_of_a_row_is_never_trained() -> None:
    (row,) = build_rows(trajectory(step("a", ids=[], response=[2, 3])))
    assert trained(row) == [3]


def test_prompts_that_are_stored_as_deltas_are_whole() -> None:
    first = step("a", ids=list(range(40)), response=[60, 61])
    second = child("b", first, [*range(40), 60, 61], [70])
    (row,) = build_rows(trajectory(first, msgspec.structs.replace(second, segments=[sampled(2)])))
    assert ids(row) == [*range(40), 60, 61, 70, 8, 9]
    assert trained(row) == [60, 61, 8, 9]


def test_segments_give_the_version_of_each_token() -> None:
    segments = [sampled(4), sampled(5, first_token=2), sampled(6, first_token=3)]
    (row,) = build_rows(trajectory(step("a", ids=[1], response=[2, 3, 4, 5, 6], segments=segments)))
    assert row.versions.tolist() == [-1, 4, 4, 5, 6, 6]


def test_a_token_is_as_old_as_the_keys_and_values_it_was_sampled_from() -> None:
    kept = msgspec.structs.replace(sampled(9, first_token=1), kv_version=7)
    (row,) = build_rows(
        trajectory(step("a", ids=[1], response=[2, 3], segments=[sampled(7), kept]))
    )
    assert row.versions.tolist() == [-1, 7, 7]


def test_the_temperature_is_that_of_the_step() -> None:
    (row,) = build_rows(
        trajectory(
            step("a", ids=[1], response=[2], sampling='{"temperature": 0.7}'),
            step("b", index=1, ids=[1, 2, 3], response=[4], sampling='{"max_tokens": 5}'),
        )
    )
    np.testing.assert_allclose(row.temperatures, [1, 0.7, 1, 1], rtol=1e-6)


def test_generated_tokens_are_counted_whether_they_are_trained_or_not() -> None:
    (row,) = build_rows(trajectory(step("a", ids=[1, 2], response=[3, 4, 5])))
    masked = Row(
        row.ids, np.zeros_like(row.trainable), row.behaviour, row.versions, row.temperatures
    )
    assert Sample("t", 0, 1.0, False, (masked,)).generated == 3


def problem(**fields: Any) -> str | None:
    return find_training_problem(trajectory(step("a", **fields)))


def test_plain_sampling_is_no_problem() -> None:
    assert problem() is None
    plain = '{"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 9}'
    assert problem(sampling=plain) is None


@pytest.mark.parametrize("setting", ["top_p", "top_k", "min_p", "presence_penalty", "logit_bias"])
def test_sampling_from_another_distribution_is_refused(setting: str) -> None:
    reason = problem(sampling=f'{{"{setting}": 0.5}}')
    assert reason == f"step a cannot be trained: the distribution was changed by {setting}"


@pytest.mark.parametrize("temperature", ['"hot"', "NaN", "Infinity", "1e999", "-1", "[]"])
def test_a_temperature_that_cannot_be_is_refused(temperature: str) -> None:
    reason = problem(sampling=f'{{"temperature": {temperature}}}')
    assert reason is not None and "which is not a positive number" in reason


@pytest.mark.parametrize(
    ("logprob", "says"),
    [
        (math.nan, "not finite"),
        (-math.inf, "not finite"),
        (0.01, "logprob of 0.01"),
        (-3e38, "logprob of -3e+38, with which no sampler draws"),
        (-9999.0, "logprob of -9999"),
        (-105.0, "logprob of -105"),
    ],
)
def test_a_logprob_that_cannot_be_is_refused(logprob: float, says: str) -> None:
    one = msgspec.structs.replace(step("a"), response_logprobs=pack_logprobs([-0.5, logprob]))
    told = find_training_problem(trajectory(one))
    assert told is not None and says in told


def test_the_least_likely_token_that_can_be_drawn_is_no_problem() -> None:
    smallest = float(np.log(np.finfo(np.float32).smallest_subnormal))
    drawn = msgspec.structs.replace(step("a"), response_logprobs=pack_logprobs([-0.5, smallest]))
    assert find_training_problem(trajectory(drawn)) is None


def test_rounding_above_zero_is_no_problem() -> None:
    rounded = msgspec.structs.replace(step("a"), response_logprobs=pack_logprobs([-0.5, 5e-5]))
    assert find_training_problem(trajectory(rounded)) is None


def test_a_temperature_at_which_no_engine_samples_is_refused() -> None:
    """Captured calls have the one that vLLM uses instead; others come with what an agent asked for."""
    assert "vLLM samples at 0.01" in (problem(sampling='{"temperature": 0.005}') or "")
    assert problem(sampling='{"temperature": 0.01}') is None


def test_greedy_decoding_is_refused() -> None:
    assert problem(sampling='{"temperature": 0}') == (
        "step a cannot be trained: greedy decoding: temperature is 0"
    )


@pytest.mark.parametrize("segments", [[], [sampled(1, first_token=1)]])
def test_tokens_of_unknown_weights_are_refused(segments: list[Segment]) -> None:
    assert problem(segments=segments) == "step a does not say which weights sampled it"


def test_a_trajectory_without_targets_says_why() -> None:
    told = problem(not_trainable="greedy decoding")
    assert told == "no Step of it can be trained: greedy decoding"
    assert problem(response=[]) == "no Step of it can be trained: the model said nothing"


def test_what_is_wrong_with_the_trajectory_comes_first() -> None:
    found = trajectory_of(step("a"), end(steps=2))
    assert find_training_problem(found) == "its End counts 2 Steps, and 1 are in the log"


def given(step_id: str, *values: float) -> StepAdvantages:
    return StepAdvantages(step_id=step_id, values=pack_logprobs(values))


def test_advantages_that_an_environment_gave_hold_for_the_tokens_of_their_step() -> None:
    records = (
        step("a", ids=[1], response=[2, 3]),
        step("b", index=1, ids=[1, 2, 3, 9], response=[4, 5]),
        step("c", index=2, ids=[1, 2, 3, 9, 4, 5], response=[6]),
    )
    advantages = [given("a", 0.5, -0.5), given("b", 2.0)]
    (row,) = build_rows(trajectory_of(*records, end(steps=3, advantages=advantages)))
    assert row.advantages is not None
    assert row.advantages[row.trainable][:4].tolist() == [0.5, -0.5, 2.0, 2.0], "one for all"
    assert math.isnan(row.advantages[-1]), "the last Step has its trajectory's"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ((1.0, 2.0, 3.0), "step a has 3 advantages for 2 tokens"),
        ((), "step a has 0 advantages for 2 tokens"),
        ((1.0, math.inf), "step a has an advantage that is not finite"),
    ],
)
def test_advantages_that_do_not_fit_are_refused(values: tuple[float, ...], sentence: str) -> None:
    made = trajectory_of(step("a", response=[2, 3]), end(advantages=[given("a", *values)]))
    assert find_training_problem(made) == sentence
