"""Sequence-level rejection: for each trajectory, whether it is kept. At most one rule is active.

Rules use means over tokens, never products: on long rows, noise alone moves a product out of any
bounds.
"""

import math

from torch import Tensor


def geometric(mean_log_ratio: Tensor, *, sequence_lo: float, sequence_hi: float) -> Tensor:
    """Keeps a trajectory if its geometric mean ratio is within bounds, whatever its length."""
    return _within(mean_log_ratio, sequence_lo, sequence_hi)


def opsm(mean_log_ratio: Tensor, advantages: Tensor, *, opsm_delta: float) -> Tensor:
    """Drops a trajectory with a negative advantage that the policy has already moved away from."""
    return ~((advantages < 0) & (-mean_log_ratio > opsm_delta))


def veto(
    log_ratio: Tensor, samples: Tensor, count: int, *, sequence_lo: float, sequence_hi: float
) -> Tensor:
    """Drops a trajectory that has any token with a ratio out of bounds."""
    outside = ~_within(log_ratio, sequence_lo, sequence_hi)
    violations = log_ratio.new_zeros(count).index_add_(0, samples, outside.to(log_ratio.dtype))
    return violations == 0


def _within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    lowest = math.log(low) if low > 0 else -math.inf
    return (log_ratio >= lowest) & (log_ratio <= math.log(high))
