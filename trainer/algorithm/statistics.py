"""Statistics of the tokens of a step, collected without waiting for the device.

Every pack yields a few sums, which are added up over packs and ranks. Nothing is divided and nothing
leaves the device before `metrics`, which is called once per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, distributed

from trainer.algorithm.divergence import k3
from trainer.algorithm.losses import LOG_RATIO_LIMIT, bounded

SUMS = (
    "tokens",
    "ratio",
    "ratio_squared",
    "difference",
    "fresh",
    "difference_fresh",
    "mismatch_kl",
    "high",
    "low",
    "masked",
    "rejected",
    "age",
    "entropy",
    "loss",
    "compared",
    "reference_kl",
)
MEANS = {
    "ratio_mean": "ratio",
    "logprob_difference": "difference",
    "mismatch_kl": "mismatch_kl",
    "masked_fraction": "masked",
    "masked_high_fraction": "high",
    "masked_low_fraction": "low",
    "rejected_fraction": "rejected",
    "age_mean": "age",
    "entropy": "entropy",
}
"""Metrics that are means over tokens, and the sums that they are computed from."""
PEAKS = ("ratio_max", "age_max", "minus_age_min")
PERCENTILES = (1, 50, 99)


@dataclass(frozen=True, slots=True)
class PackStatistics:
    """Statistics of one pack, or of all packs that were added up."""

    sums: Tensor
    """[SUMS], float64."""
    peaks: Tensor
    """[PEAKS], float64; minus infinity without tokens."""
    trajectories: Tensor
    """[S, 3], float64: for each trajectory the sum of c - b, its tokens, and how often it was
    rejected."""
    numbered: bool
    """Whether index s is the same trajectory in all packs of all ranks, so that a trajectory may lie in
    several packs. Otherwise every pack has its own trajectories."""

    def __add__(self, other: PackStatistics) -> PackStatistics:
        if self.numbered != other.numbered:
            raise ValueError("pass the number of trajectories with all packs, or with none")
        return PackStatistics(
            self.sums + other.sums,
            torch.maximum(self.peaks, other.peaks),
            self.trajectories + other.trajectories
            if self.numbered
            else torch.cat([self.trajectories, other.trajectories]),
            self.numbered,
        )

    def over_ranks(self) -> PackStatistics:
        """The statistics of all ranks together; every rank has to call it."""
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            return self
        if not self.numbered:
            raise ValueError("over several ranks, pass the number of trajectories with all packs")
        sums, peaks, trajectories = (
            tensor.clone() for tensor in (self.sums, self.peaks, self.trajectories)
        )
        distributed.all_reduce(sums)
        distributed.all_reduce(peaks, distributed.ReduceOp.MAX)
        distributed.all_reduce(trajectories)
        return PackStatistics(sums, peaks, trajectories, True)

    def metrics(self) -> dict[str, float]:
        """Waits for the device. Means are over tokens; values without data are left out."""
        sums = dict(zip(SUMS, self.sums.tolist(), strict=True))
        peaks = dict(zip(PEAKS, self.peaks.tolist(), strict=True))
        tokens, fresh = sums["tokens"], sums["fresh"]
        if not tokens:
            return {"tokens": 0.0}
        means = {name: sums[column] / tokens for name, column in MEANS.items()}
        metrics = means | {
            "tokens": tokens,
            "tokens_age_0": fresh,
            "loss": sums["loss"],
            "ess": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]),
            "ratio_max": peaks["ratio_max"],
            "age_max": peaks["age_max"],
            "age_min": -peaks["minus_age_min"],
        }
        if fresh:
            metrics["logprob_difference_age_0"] = sums["difference_fresh"] / fresh
        if sums["compared"]:
            metrics["kl"] = sums["reference_kl"] / sums["compared"]
        return metrics | _trajectory_metrics(self.trajectories.cpu().numpy())


def pack_statistics(
    *,
    gap: Tensor,
    ages: Tensor,
    entropy: Tensor,
    high: Tensor,
    low: Tensor,
    rejected: Tensor,
    reference_kl: Tensor | None,
    loss: Tensor,
    trajectories: Tensor,
    kept: Tensor | None,
    numbered: bool,
) -> PackStatistics:
    """Statistics from flat tensors without gradient; `gap` is c - b, and `loss` the weighted loss per
    token.

    `trajectories` has the sum of `gap` and the number of tokens of each; `kept` is None if all are
    kept.
    """
    log_ratio = bounded(gap)
    ratio, difference, fresh = log_ratio.exp(), gap.abs(), ages == 0
    one, nothing = torch.ones_like(gap), torch.zeros_like(gap)
    columns = (
        one,
        ratio,
        ratio.square(),
        difference,
        fresh,
        difference * fresh,
        k3(log_ratio),
        high,
        low,
        high | low,
        rejected,
        ages,
        entropy,
        loss,
        *((nothing, nothing) if reference_kl is None else (one, reference_kl)),
    )
    sums = torch.stack([column.to(gap.dtype) for column in columns]).sum(1, dtype=torch.float64)
    # The padding in front of the tokens is the result of a pack without tokens.
    extremes = torch.stack([ratio, ages.to(gap.dtype), -ages.to(gap.dtype)])
    peaks = torch.nn.functional.pad(extremes, (1, 0), value=-torch.inf).amax(1)
    rejections = torch.zeros_like(trajectories[:, 0]) if kept is None else ~kept
    each = torch.cat([trajectories, rejections.to(gap.dtype).unsqueeze(1)], 1)
    return PackStatistics(sums, peaks.double(), each.double(), numbered)


def _trajectory_metrics(
    table: np.ndarray[tuple[int, int], np.dtype[np.float64]],
) -> dict[str, float]:
    trained = table[table[:, 1] > 0]
    log_ratios = trained[:, 0] / trained[:, 1]
    ratios = np.exp(np.clip(log_ratios, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    values = np.percentile(ratios, PERCENTILES)
    percentiles = {
        f"geo_ratio_p{percentile}": float(value)
        for percentile, value in zip(PERCENTILES, values, strict=True)
    }
    return percentiles | {
        "trajectories": float(len(trained)),
        "rejected_trajectories_fraction": float(np.mean(trained[:, 2] > 0)),
    }
