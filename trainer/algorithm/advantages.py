"""Computes advantages from rewards: how much more a trajectory earned than its group.

Only usable members have rewards here. Without a failed member, the others get what they would get in a
smaller group; a single member has nothing to be compared with and gets 0.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.algorithm.choices import AdvantageMode

Floats = NDArray[np.float64]

EPSILON = 1e-6
"""Added to a standard deviation, as in verl."""


def compute_advantages(rewards: Sequence[Floats], mode: AdvantageMode) -> list[Floats]:
    """One array per group."""
    above = [above_mean(group) for group in rewards]
    if mode == "loo":
        return [group * leave_one_out_factor(len(group)) for group in above]
    spreads = normalizers(above, mode)
    return [group / spread for group, spread in zip(above, spreads, strict=True)]


def normalizers(above: Sequence[Floats], mode: AdvantageMode) -> list[float]:
    """For each group, what its advantages are divided by. `above` has one value per
    member: how much more than its group it earned."""
    if mode == "batch_std":
        return [_batch_std(above) + EPSILON] * len(above)
    if mode == "group_std":
        return [_sample_std(group) + EPSILON for group in above]
    return [1.0] * len(above)


def above_mean(rewards: Floats) -> Floats:
    """The rewards minus their mean; 0 for a single one, which nothing is compared with."""
    rewards = np.asarray(rewards, np.float64)
    return rewards - rewards.mean() if len(rewards) > 1 else np.zeros(len(rewards))


def leave_one_out_factor(size: int) -> float:
    """The factor by which leaving a member out of its own baseline increases its advantage."""
    return size / (size - 1) if size > 1 else 1.0


def _batch_std(above: Sequence[Floats]) -> float:
    """Standard deviation over all groups. The mean of each is 0; groups of one member are left out."""
    compared = [group for group in above if len(group) > 1]
    count = sum(len(group) for group in compared)
    squares = sum(float(group @ group) for group in compared)
    return float(np.sqrt(squares / max(count, 1)))


def _sample_std(above: Floats) -> float:
    return float(np.sqrt(above @ above / max(len(above) - 1, 1)))
