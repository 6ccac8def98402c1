"""Computes the loss of a pack from its trainable tokens.

    loss = sum over tokens of  weight * (policy term + drift + KL to the reference - entropy)

A sequence mask removes the policy term of the trajectories it rejects, the trust region that of single
tokens. The other terms apply to every token, and every token keeps its weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithm import losses, masks
from trainer.algorithm.divergence import reference_kl
from trainer.algorithm.losses import TokenLoss, bounded
from trainer.algorithm.settings import LossSettings
from trainer.algorithm.statistics import PackStatistics, pack_statistics

ENTROPY_WEIGHT_LIMIT = 20.0
"""Largest weight of a token in the entropy bonus, the same as in the default loss."""


@dataclass(slots=True)
class Tokens:
    """The trainable tokens of one pack, flat; every tensor is [N]."""

    current: Tensor
    """c_t: log-probs under the current policy, float32, with gradient."""
    behaviour: Tensor
    """b_t: log-probs at sampling, float32."""
    advantages: Tensor
    """A_i of the token's trajectory, float32."""
    weights: Tensor
    """Weight of the token in the loss of the batch (see `aggregation`), float32."""
    samples: Tensor
    """Index of the token's trajectory, int64."""
    ages: Tensor
    """Age of the token in versions, int64; -1 if unknown."""
    entropy: Tensor
    """Entropy of the current distribution at the token, at its temperature, without gradient."""
    proximal: Tensor | None = None
    """p_t: log-probs under the proximal policy, if `needs_proximal`."""
    reference: Tensor | None = None
    """f_t: log-probs under the reference model, if `needs_reference`."""
    trajectories: int | None = None
    """Number of trajectories in the batch, if `samples` are indices in it. If None, `samples` are
    indices in the pack, and counting them waits for the device."""


def objective(settings: LossSettings, tokens: Tokens) -> tuple[Tensor, PackStatistics]:
    """The pack's part of the loss, with gradient, and the statistics of its tokens."""
    gap = tokens.current - tokens.behaviour
    drift = gap.detach()
    count = _count(tokens)
    sums = _by_trajectory(torch.stack([drift, torch.ones_like(drift)], 1), tokens.samples, count)
    policy = _policy(settings, tokens, gap, _means(sums))
    kept = _kept(settings, tokens, drift, _means(sums))
    rejected = torch.zeros_like(policy.high) if kept is None else ~kept[tokens.samples]

    loss = policy.loss if kept is None else policy.loss.masked_fill(rejected, 0.0)
    if settings.tau:
        loss = loss + settings.tau * bounded(gap).square()
    kl = _reference_kl(settings, tokens)
    if kl is not None:
        loss = loss + settings.kl_beta * (kl * bounded(gap).exp() if settings.kl_off_policy else kl)
    if settings.entropy_bonus:
        loss = loss + settings.entropy_bonus * _entropy_descent(tokens, drift)
    weighted = tokens.weights * loss

    return weighted.sum(), pack_statistics(
        gap=drift,
        ages=tokens.ages,
        entropy=tokens.entropy,
        high=policy.high,
        low=policy.low,
        rejected=rejected,
        reference_kl=None if kl is None else kl.detach(),
        loss=weighted.detach(),
        trajectories=sums,
        kept=kept,
        numbered=tokens.trajectories is not None,
    )


def _policy(settings: LossSettings, tokens: Tokens, gap: Tensor, means: Tensor) -> TokenLoss:
    current, behaviour, advantages = tokens.current, tokens.behaviour, tokens.advantages
    parameters = settings.loss_parameters
    match settings.loss:
        case "dppo_tv":
            return losses.dppo_tv(current, behaviour, advantages, **parameters)
        case "ppo_clip":
            return losses.ppo_clip(gap, advantages, **parameters)
        case "cispo":
            return losses.cispo(current, gap, advantages, **parameters)
        case "icepop":
            return losses.icepop(current, gap, advantages, **parameters)
        case "kpop":
            return losses.kpop(current, behaviour, advantages, **parameters)
        case "gspo":
            return losses.gspo(current, means[tokens.samples], advantages, **parameters)
        case "decoupled":
            proximal = _proximal(settings, tokens)
            parameters = parameters | settings.rho_parameters
            return losses.decoupled(
                current - proximal, proximal - behaviour, advantages, **parameters
            )


def _proximal(settings: LossSettings, tokens: Tokens) -> Tensor:
    """p_t: interpolated log-linearly between sampling and the current policy by age, or recomputed."""
    now = tokens.current.detach()
    if settings.proximal == "loglinear":
        ages = tokens.ages.clamp(min=0).to(now.dtype)  # -1 means unknown
        return tokens.behaviour + ages / (ages + 1) * (now - tokens.behaviour)
    return _recomputed(settings, tokens)


def _recomputed(settings: LossSettings, tokens: Tokens) -> Tensor:
    if tokens.proximal is not None:
        return tokens.proximal
    if settings.needs_proximal:
        raise ValueError("these settings need proximal log-probs, and the tokens have none")
    return tokens.current.detach()


def _kept(settings: LossSettings, tokens: Tokens, drift: Tensor, means: Tensor) -> Tensor | None:
    """For each trajectory, whether it is kept; None if no rule is active."""
    samples, count, bounds = tokens.samples, len(means), settings.mask_parameters
    match settings.sequence_mask:
        case "geometric":
            # A log-linear p_t equals b_t at age 0 and would hide a mismatch with the engines.
            if settings.needs_proximal:
                log_rho = (_recomputed(settings, tokens) - tokens.behaviour).unsqueeze(1)
                ones = torch.ones_like(log_rho)
                means = _means(_by_trajectory(torch.cat([log_rho, ones], 1), samples, count))
            return masks.geometric(means, **bounds)
        case "opsm":
            # An environment may give every token an advantage of its own; their mean counts.
            pairs = torch.stack([tokens.advantages, torch.ones_like(tokens.advantages)], 1)
            mean_advantages = _means(_by_trajectory(pairs, samples, count))
            return masks.opsm(means, mean_advantages, opsm_delta=settings.opsm_delta or 0.0)
        case "veto":
            return masks.veto(drift, samples, count, **bounds)
        case "none":
            return None


def _reference_kl(settings: LossSettings, tokens: Tokens) -> Tensor | None:
    if not settings.needs_reference:
        return None
    if tokens.reference is None:
        raise ValueError("these settings need log-probs of the reference, and the tokens have none")
    return reference_kl(tokens.current, tokens.reference, settings.kl_estimator or "k3")


def _entropy_descent(tokens: Tokens, drift: Tensor) -> Tensor:
    """A term whose gradient equals, on average over sampled tokens, that of the negative entropy.

    It lowers the probability of tokens that are more likely than average at their position. Its value
    has no meaning. It needs no gradient through all logits.
    """
    surprise = (tokens.current.detach() + tokens.entropy) * tokens.current
    return bounded(drift).exp().clamp(max=ENTROPY_WEIGHT_LIMIT) * surprise


def _count(tokens: Tokens) -> int:
    if tokens.trajectories is not None:
        return tokens.trajectories
    return int(tokens.samples.max()) + 1 if len(tokens.samples) else 0


def _by_trajectory(values: Tensor, samples: Tensor, count: int) -> Tensor:
    return values.new_zeros(count, values.shape[1]).index_add_(0, samples, values)


def _means(sums: Tensor) -> Tensor:
    return sums[:, 0] / sums[:, 1].clamp(min=1)
