"""The losses of a token, each a pure function of flat tensors; all are minimized.

`current` and what is computed from it carries the gradient. A weight that must not carry one is
detached here, in one place per loss. Parameters have the names of `LossSettings`. A token whose
gradient is masked still counts in the denominator of the batch and still gets the regularizers that
`objective` adds.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.algorithm.divergence import binary_kl

LOG_RATIO_LIMIT = 20.0
"""Its exponential is far beyond every trust region, and the square of that still fits into a
float32."""


class TokenLoss(NamedTuple):
    """The loss l_t, and where the trust region masked it because the ratio was too high or too low."""

    loss: Tensor
    high: Tensor
    low: Tensor


def bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def dppo_tv(
    current: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    d_lo: float,
    d_hi: float,
    ratio_cap: float,
) -> TokenLoss:
    """Masks a token whose probability has already moved too far in the direction of its advantage."""
    now = current.detach()
    moved = now.exp() - behaviour.exp()
    high = (advantages > 0) & (moved > d_hi)
    low = (advantages < 0) & (moved < -d_lo)
    weight = bounded(now - behaviour).exp().clamp(max=ratio_cap)
    return TokenLoss(_reinforce(current, weight, advantages, high | low), high, low)


def ppo_clip(
    log_ratio: Tensor, advantages: Tensor, *, e_lo: float, e_hi: float, dual_clip: float
) -> TokenLoss:
    ratio = bounded(log_ratio).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(1 - e_lo, 1 + e_hi) * advantages)
    # Without a floor, one large ratio with a negative advantage would dominate the batch.
    floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
    down = advantages < 0
    high = torch.where(down, ratio > dual_clip, (ratio > 1 + e_hi) & (advantages > 0))
    return TokenLoss(-torch.max(gain, floor), high, down & (ratio < 1 - e_lo))


def cispo(
    current: Tensor, log_ratio: Tensor, advantages: Tensor, *, e_lo: float, e_hi: float
) -> TokenLoss:
    """Clips the weight of a token, but never removes its gradient."""
    ratio = bounded(log_ratio.detach()).exp()
    weight = ratio.clamp(1 - e_lo, 1 + e_hi)
    return TokenLoss(-weight * advantages * current, ratio > 1 + e_hi, ratio < 1 - e_lo)


def icepop(
    current: Tensor, log_ratio: Tensor, advantages: Tensor, *, band_lo: float, band_hi: float
) -> TokenLoss:
    """Masks a token whose ratio lies outside of a band."""
    ratio = bounded(log_ratio.detach()).exp()
    high, low = ratio > band_hi, ratio < band_lo
    return TokenLoss(_reinforce(current, ratio, advantages, high | low), high, low)


def kpop(
    current: Tensor, behaviour: Tensor, advantages: Tensor, *, kpop_d: float, ratio_cap: float
) -> TokenLoss:
    """Masks a token whose probability differs too much, by the larger of two binary KLs."""
    now = current.detach()
    far = torch.max(binary_kl(now, behaviour), binary_kl(behaviour, now)) > kpop_d
    weight = bounded(now - behaviour).exp().clamp(max=ratio_cap)
    rose = now > behaviour
    return TokenLoss(_reinforce(current, weight, advantages, far), far & rose, far & ~rose)


def gspo(
    current: Tensor, mean_log_ratio: Tensor, advantages: Tensor, *, e_lo: float, e_hi: float
) -> TokenLoss:
    """Clips one ratio per trajectory; `mean_log_ratio` is the mean of the token's trajectory."""
    level = bounded(mean_log_ratio.detach()).exp()
    ratio = level * (current - current.detach()).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(1 - e_lo, 1 + e_hi) * advantages)
    high = (advantages > 0) & (level > 1 + e_hi)
    low = (advantages < 0) & (level < 1 - e_lo)
    return TokenLoss(-gain, high, low)


def decoupled(
    log_ratio: Tensor,
    log_rho: Tensor,
    advantages: Tensor,
    *,
    e_lo: float,
    e_hi: float,
    dual_clip: float,
    rho_hi: float,
    rho_lo: float | None = None,
) -> TokenLoss:
    """PPO around the proximal policy, weighted by its ratio rho to the policy that sampled.

    The weight is truncated at `rho_hi`; if `rho_lo` is set too, it is 0 outside of both bounds.
    """
    clipped = ppo_clip(log_ratio, advantages, e_lo=e_lo, e_hi=e_hi, dual_clip=dual_clip)
    rho = bounded(log_rho.detach()).exp()
    if rho_lo is None:
        return clipped._replace(loss=rho.clamp(max=rho_hi) * clipped.loss)
    high, low = rho > rho_hi, rho < rho_lo
    weight = rho.masked_fill(high | low, 0.0)
    return TokenLoss(weight * clipped.loss, clipped.high | high, clipped.low | low)


def _reinforce(current: Tensor, weight: Tensor, advantages: Tensor, masked: Tensor) -> Tensor:
    return -(weight * advantages).masked_fill(masked, 0.0) * current
