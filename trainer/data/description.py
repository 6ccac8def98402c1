"""What a batch looks like, before any model sees it."""

import numpy as np

from trainer.algorithm.advantages import Total, here
from trainer.data.batch import Batch


def describe(batch: Batch, total: Total = here) -> dict[str, float]:
    """Over all ranks; every rank has to call it."""
    rewards = np.array([sample.reward for sample in batch.samples], np.float64)
    worth = np.array(batch.advantages, np.float64)
    spans = [
        len({int(v) for r in s.rows for v in np.unique(r.versions[r.trainable])})
        for s in batch.samples
    ]
    count, reward, squares, worth_squares, spanned, truncated, rows, generated = total(
        np.array(
            [
                len(rewards),
                rewards.sum(),
                rewards @ rewards,
                worth @ worth,
                sum(spans),
                sum(sample.truncated for sample in batch.samples),
                sum(len(sample.rows) for sample in batch.samples),
                sum(sample.generated for sample in batch.samples),
            ],
            np.float64,
        )
    )
    n = max(count, 1.0)
    mean = reward / n
    return {
        "trajectories": float(count),
        "reward_mean": float(mean),
        "reward_std": float(np.sqrt(max(squares / n - mean**2, 0.0))),
        "advantage_std": float(np.sqrt(worth_squares / n)),
        "spans_mean": float(spanned / n),
        "truncated_fraction": float(truncated / n),
        "rows_per_trajectory": float(rows / n),
        "generated_mean": float(generated / n),
    }
