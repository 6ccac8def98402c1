"""Computes the weight of a token in the loss of the batch: one weight per row.

Only trainable tokens count. Tokens removed because of validity, age, truncation or a failure are in no
denominator. Tokens that the trust region masks later stay in the denominator, so a mask never increases
the weight of other tokens. In every mean, the weights sum to 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.algorithm.advantages import Floats
from trainer.algorithm.choices import Aggregation


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """The numbers of trainable tokens of one trajectory."""

    group: int
    """Index of its group."""
    rows: tuple[int, ...]
    """Trainable tokens of each row."""

    @property
    def tokens(self) -> int:
        return sum(self.rows)


def token_weights(
    mode: Aggregation,
    counts: Sequence[SampleCounts],
    *,
    l_const: int | None = None,
) -> list[Floats]:
    """For each trajectory, the weight of a token of each of its rows."""
    tokens = np.array([sample.tokens for sample in counts], np.float64)
    if mode == "seq_mean_token_mean":
        return _per_row(counts)
    if mode == "prompt_mean":
        each = _per_prompt(counts, tokens)
    elif mode == "token_mean":
        each = np.full(len(counts), _one_over(tokens.sum()))
    else:
        trajectories = _one_over(float(np.count_nonzero(tokens)))
        lengths = (
            tokens if mode == "rollout_mean" else np.full(len(counts), _require_length(l_const))
        )
        each = trajectories * _one_over(lengths)
    return [
        np.where(_sizes(sample) > 0, weight, 0.0)
        for sample, weight in zip(counts, each, strict=True)
    ]


def _per_row(counts: Sequence[SampleCounts]) -> list[Floats]:
    rows = sum(np.count_nonzero(sample.rows) for sample in counts)
    share = _one_over(float(rows))
    return [share * _one_over(_sizes(sample)) for sample in counts]


def _per_prompt(counts: Sequence[SampleCounts], tokens: Floats) -> Floats:
    own = np.array([sample.group for sample in counts], np.int64)
    sizes = np.bincount(own, tokens).astype(np.float64)
    each: Floats = _one_over(sizes)[own] * _one_over(float(np.count_nonzero(sizes)))
    return each


def _sizes(sample: SampleCounts) -> Floats:
    return np.array(sample.rows, np.float64)


def _one_over(count: Floats | float) -> NDArray[np.float64]:
    """1 / count, and 0 where count is 0."""
    count = np.asarray(count, np.float64)
    return np.divide(1.0, count, out=np.zeros_like(count), where=count > 0)


def _require_length(l_const: int | None) -> float:
    if l_const is None:
        raise ValueError("seq_sum_norm needs l_const")
    return float(l_const)
