"""What the tokens of a step look like, gathered without waiting for the device.

Every pack leaves a few sums. Packs and ranks are put together by addition; nothing is divided and
nothing leaves the device before `metrics`, once per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, distributed

from trainer.algorithm.divergence import k3
from trainer.algorithm.losses import bounded

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
"""Metrics that are a sum over tokens, divided by their number."""
PEAKS = ("ratio_max", "age_max", "minus_age_min")
PERCENTILES = (1, 50, 99)


@dataclass(frozen=True, slots=True)
class PackStatistics:
    """Of one pack, or of everything that was added up."""

    sums: Tensor
    """[SUMS], float64."""
    peaks: Tensor
    """[PEAKS], float64; minus infinity without tokens."""
    trajectories: Tensor
    """[S, 3], float64, for each trajectory: sum of c - b, tokens, times it was rejected."""
    numbered: bool
    """Whether place s is the same trajectory in all packs of this rank, so that a trajectory may lie
    in several packs; otherwise every pack has trajectories of its own."""

    def __add__(self, other: PackStatistics) -> PackStatistics:
        if self.numbered != other.numbered:
            raise ValueError("give the number of trajectories with all packs, or with none")
        return PackStatistics(
            self.sums + other.sums,
            torch.maximum(self.peaks, other.peaks),
            self.trajectories + other.trajectories
            if self.numbered
            else torch.cat([self.trajectories, other.trajectories]),
            self.numbered,
        )

    def over_ranks(self) -> PackStatistics:
        """The same of all ranks together; each of them has to call it."""
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            return self
        sums, peaks = self.sums.clone(), self.peaks.clone()
        distributed.all_reduce(sums)
        distributed.all_reduce(peaks, distributed.ReduceOp.MAX)
        return PackStatistics(sums, peaks, _joined(self.trajectories), False)

    def metrics(self) -> dict[str, float]:
        """Waits for the device. Means are over tokens; what nothing was seen of is left out."""
        sums = dict(zip(SUMS, self.sums.tolist(), strict=True))
        peaks = dict(zip(PEAKS, self.peaks.tolist(), strict=True))
        tokens, fresh = sums["tokens"], sums["fresh"]
        if not tokens:
            return {"tokens": 0.0}
        means = {name: sums[column] / tokens for name, column in MEANS.items()}
        found = means | {
            "tokens": tokens,
            "tokens_age_0": fresh,
            "loss": sums["loss"],
            "ess": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]),
            "ratio_max": peaks["ratio_max"],
            "age_max": peaks["age_max"],
            "age_min": -peaks["minus_age_min"],
        }
        if fresh:
            found["logprob_difference_age_0"] = sums["difference_fresh"] / fresh
        if sums["compared"]:
            found["kl"] = sums["reference_kl"] / sums["compared"]
        return found | _of_trajectories(self.trajectories.cpu().numpy())


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
    """From flat tensors without gradient; `gap` is c - b and `loss` each token's part of the loss.

    `trajectories` has each one's sum of `gap` and tokens; `kept` is None where all of them are.
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
    # What stands in front of the tokens is the answer of a pack that has none.
    extremes = torch.stack([ratio, ages.to(gap.dtype), -ages.to(gap.dtype)])
    peaks = torch.nn.functional.pad(extremes, (1, 0), value=-torch.inf).amax(1)
    refused = torch.zeros_like(trajectories[:, 0]) if kept is None else ~kept
    each = torch.cat([trajectories, refused.to(gap.dtype).unsqueeze(1)], 1)
    return PackStatistics(sums, peaks.double(), each.double(), numbered)


def _joined(trajectories: Tensor) -> Tensor:
    """Those of all ranks, one after another; ranks have different numbers of them."""
    ranks = distributed.get_world_size()
    own = torch.tensor([len(trajectories)], device=trajectories.device)
    sizes = [torch.zeros_like(own) for _ in range(ranks)]
    distributed.all_gather(sizes, own)
    longest = max(int(size) for size in sizes)
    padded = trajectories.new_zeros(longest, trajectories.shape[1])
    padded[: len(trajectories)] = trajectories
    parts = [torch.zeros_like(padded) for _ in range(ranks)]
    distributed.all_gather(parts, padded)
    return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])


def _of_trajectories(table: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> dict[str, float]:
    trained = table[table[:, 1] > 0]
    ratios = np.exp(trained[:, 0] / trained[:, 1])
    marks = np.percentile(ratios, PERCENTILES)
    found = {f"geo_ratio_p{mark}": float(at) for mark, at in zip(PERCENTILES, marks, strict=True)}
    return found | {
        "trajectories": float(len(trained)),
        "rejected_trajectories_fraction": float(np.mean(trained[:, 2] > 0)),
    }
