from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.advantages import Floats
from trainer.algorithm.aggregation import SampleCounts, token_weights
from trainer.algorithm.choices import Aggregation

MEANS: tuple[Aggregation, ...] = get_args(Aggregation)[:4]
# Two groups; the second trajectory has two rows, the last nothing that is trained.
BATCH = [
    SampleCounts(0, (4,)),
    SampleCounts(0, (1, 3)),
    SampleCounts(1, (2,)),
    SampleCounts(1, (0,)),
]
BATCHES = st.lists(
    st.builds(
        SampleCounts,
        st.integers(0, 3),
        st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    ),
    max_size=6,
)


def flat(found: Sequence[Floats]) -> list[float]:
    return [float(weight) for rows in found for weight in rows]


def summed(counts: Sequence[SampleCounts], found: Sequence[Floats]) -> float:
    pairs = zip(counts, found, strict=True)
    return sum(float(np.dot(sample.rows, rows)) for sample, rows in pairs)


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token_mean", [1 / 10, 1 / 10, 1 / 10, 1 / 10, 0]),
        ("prompt_mean", [1 / 16, 1 / 16, 1 / 16, 1 / 4, 0]),
        ("rollout_mean", [1 / 12, 1 / 12, 1 / 12, 1 / 6, 0]),
        ("seq_mean_token_mean", [1 / 16, 1 / 4, 1 / 12, 1 / 8, 0]),
        ("seq_sum_norm", [1 / 300, 1 / 300, 1 / 300, 1 / 300, 0]),
    ],
)
def test_weights(mode: Aggregation, weights: list[float]) -> None:
    l_const = 100 if mode == "seq_sum_norm" else None
    assert flat(token_weights(mode, BATCH, l_const=l_const)) == pytest.approx(weights)


def test_what_is_not_trained_is_in_no_denominator() -> None:
    for mode in MEANS:
        assert flat(token_weights(mode, BATCH))[:4] == flat(token_weights(mode, BATCH[:3]))


@pytest.mark.parametrize("mode", ["token_mean", "prompt_mean", "rollout_mean"])
@given(rows=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_merged_and_split_rows_weigh_the_same(mode: Aggregation, rows: list[int]) -> None:
    others = [SampleCounts(0, (5,)), SampleCounts(1, (2, 2))]
    split = token_weights(mode, [*others, SampleCounts(1, tuple(rows))])
    merged = token_weights(mode, [*others, SampleCounts(1, (sum(rows),))])
    assert split[2] == pytest.approx(np.repeat(merged[2], len(rows)))
    assert flat(split[:2]) == pytest.approx(flat(merged[:2]))


def test_a_mean_per_row_moves_when_rows_are_split() -> None:
    merged = token_weights("seq_mean_token_mean", [SampleCounts(0, (4,)), SampleCounts(0, (4,))])
    split = token_weights("seq_mean_token_mean", [SampleCounts(0, (4,)), SampleCounts(0, (1, 3))])
    assert merged[0] == pytest.approx([1 / 8])
    assert split[0] == pytest.approx([1 / 12])


@pytest.mark.parametrize("mode", MEANS)
@given(counts=BATCHES)
def test_the_weights_of_a_mean_sum_to_1(mode: Aggregation, counts: list[SampleCounts]) -> None:
    found = token_weights(mode, counts)
    some = any(sample.tokens for sample in counts)
    assert summed(counts, found) == pytest.approx(1.0 if some else 0.0)


def test_the_constant_is_not_guessed() -> None:
    with pytest.raises(ValueError, match="l_const"):
        token_weights("seq_sum_norm", BATCH)
