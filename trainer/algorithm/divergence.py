"""KL divergences between policies, estimated at sampled tokens."""

import torch
from torch import Tensor

from trainer.algorithm.choices import KLEstimator

LOG_LIMIT = 20.0
K3_LIMIT = 10.0
"""Limit of k3; a token that is much more likely under the reference would otherwise dominate the
gradient."""
NEARLY_ONE = -1e-6
"""Largest log-prob in a binary KL; at probability 1 the other event would have probability 0."""


def reference_kl(current: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """The KL divergence of the current policy from the reference, with gradient for the current one."""
    x = (reference - current).clamp(-LOG_LIMIT, LOG_LIMIT)
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    return k3(x).clamp(max=K3_LIMIT)


def k3(x: Tensor) -> Tensor:
    """exp(x) - x - 1, which is never negative; expm1 keeps the precision for small x."""
    return x.expm1() - x


def binary_kl(of: Tensor, to: Tensor) -> Tensor:
    """The KL divergence of two binary distributions: this token, or any other one."""
    x, y = of.clamp(max=NEARLY_ONE), to.clamp(max=NEARLY_ONE)
    others, others_to = -torch.expm1(x), -torch.expm1(y)
    return x.exp() * (x - y) + others * (others.log() - others_to.log())
