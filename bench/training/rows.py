"""Training rows with lengths like those of agents: most short, a few long, a third of them prompt."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from pool.core.rows import Row
from trainer.data.sample import Sample

GROUP = 8
PROMPT_SHARE = 1 / 3
SPREAD = 0.8
"""Standard deviation of the logarithm of lengths."""


def lengths(count: int, mean: int, most: int, seed: int = 0) -> "np.ndarray[Any, Any]":
    """Log-normal lengths, at most `most`."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count)
    return np.clip(drawn, 16, most).astype(np.int64)


def batch_of(sizes: "np.ndarray[Any, Any]", vocabulary: int, seed: int = 0) -> Any:
    """An object with the fields of trainer.data.batch.Batch, made without the log."""
    rng = np.random.default_rng(seed)
    samples = [
        Sample(str(index), index // GROUP, 0.0, False, (_row(int(size), vocabulary, rng),))
        for index, size in enumerate(sizes)
    ]
    return SimpleNamespace(
        version=4,
        seed=seed,
        groups=-(-len(sizes) // GROUP),
        samples=samples,
        advantages=rng.normal(size=len(sizes)).tolist(),
    )


def batch_of_groups(
    groups: int, size: int, prompt: int, answer: int, vocabulary: int, seed: int = 0
) -> Any:
    """Groups of rows that share their prompt, and nothing else."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        rows = [_row(prompt + answer, vocabulary, rng, prompt) for _ in range(size)]
        for row in rows[1:]:
            row.ids[:prompt] = rows[0].ids[:prompt]
        samples += [Sample(f"{group}-{n}", group, 0.0, False, (row,)) for n, row in enumerate(rows)]
    advantages = rng.normal(size=len(samples)).tolist()
    return SimpleNamespace(
        version=4, seed=seed, groups=groups, samples=samples, advantages=advantages
    )


def _row(size: int, vocabulary: int, rng: np.random.Generator, prompt: int | None = None) -> Row:
    first = max(int(size * PROMPT_SHARE), 1) if prompt is None else prompt
    sampled = np.arange(size) >= first
    likely = np.float32(-np.log(vocabulary))
    return Row(
        ids=rng.integers(0, vocabulary, size).astype(np.int32),
        trainable=sampled,
        behaviour=np.where(sampled, likely, 0).astype(np.float32),
        versions=np.where(sampled, 3, -1).astype(np.int32),
        temperatures=np.ones(size, np.float32),
    )
