"""Sequence-level rejection: which trajectories are kept, one answer each; at most one rule at a time.

Means over tokens, never products: on long rows a product leaves every bound by noise alone.
"""

import math

from torch import Tensor


def geometric(mean_log_ratio: Tensor, *, sequence_lo: float, sequence_hi: float) -> Tensor:
    """Keep a trajectory whose mean ratio lies within bounds; it does not depend on length."""
    return _within(mean_log_ratio, sequence_lo, sequence_hi)


def opsm(mean_log_ratio: Tensor, advantages: Tensor, *, opsm_delta: float) -> Tensor:
    """Drop a bad trajectory that the policy has moved away from already."""
    return ~((advantages < 0) & (-mean_log_ratio > opsm_delta))


def veto(
    log_ratio: Tensor, samples: Tensor, count: int, *, sequence_lo: float, sequence_hi: float
) -> Tensor:
    """Drop a trajectory with any token of an impossible ratio."""
    outside = ~_within(log_ratio, sequence_lo, sequence_hi)
    found = log_ratio.new_zeros(count).index_add_(0, samples, outside.to(log_ratio.dtype))
    return found == 0


def _within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    lowest = math.log(low) if low > 0 else -math.inf
    return (log_ratio >= lowest) & (log_ratio <= math.log(high))
