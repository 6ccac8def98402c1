"""Metrics of a batch that need no model."""

import numpy as np

from trainer.data.batch import Batch
from trainer.data.sample import Sample


def batch_metrics(batch: Batch) -> dict[str, float]:
    sums = _sums(batch)
    trajectories = max(sums["trajectories"], 1.0)
    mean = {name: float(value) / trajectories for name, value in sums.items()}
    metrics = {
        "trajectories": float(sums["trajectories"]),
        "reward_mean": mean["reward"],
        "reward_std": float(np.sqrt(max(mean["reward_squared"] - mean["reward"] ** 2, 0.0))),
        "advantage_std": float(np.sqrt(mean["advantage_squared"])),
        "spans_mean": mean["spans"],
        "truncated_fraction": mean["truncated"],
        # A Step whose prompt continues no row starts a new one.
        "prefix_break_fraction": (mean["rows"] - 1) / max(mean["steps"], 1.0),
        "generated_mean": mean["generated"],
    }
    if sums["turns"]:
        metrics["turns_mean"] = mean["turns"]
        metrics["turn_advantage_std"] = float(np.sqrt(mean["turn_variance"]))
    return metrics


def _sums(batch: Batch) -> dict[str, float]:
    samples = batch.samples
    rewards = np.array([sample.reward for sample in samples], np.float64)
    advantages = np.array(batch.advantages, np.float64)
    turns = [np.array(sample.turn_advantages, np.float64) for sample in samples]
    turn_variance = sum(float(each.var()) for each in turns if len(each))
    return {
        "trajectories": len(samples),
        "reward": rewards.sum(),
        "reward_squared": rewards @ rewards,
        # The advantage of a sample is the mean of its turns'.
        "advantage_squared": advantages @ advantages + turn_variance,
        "turns": sum(map(len, turns)),
        "turn_variance": turn_variance,
        "spans": sum(map(_version_count, samples)),
        "truncated": sum(sample.truncated for sample in samples),
        "rows": sum(len(sample.rows) for sample in samples),
        "steps": sum(sample.steps for sample in samples),
        "generated": sum(sample.generated for sample in samples),
    }


def _version_count(sample: Sample) -> int:
    """How many versions sampled its tokens."""
    return len({int(v) for row in sample.rows for v in np.unique(row.versions[row.trainable])})
