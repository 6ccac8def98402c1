"""Packs of tokens, as short as the numbers that matter."""

from collections.abc import Sequence
from typing import Any

import torch

from trainer.algorithm.objective import Tokens

Numbers = Sequence[float]


def tensor(values: Numbers, gradient: bool = False) -> Any:
    return torch.tensor(values, dtype=torch.float32, requires_grad=gradient)


def tokens(
    current: Numbers,
    behaviour: Numbers,
    advantages: Numbers,
    *,
    weights: Numbers | None = None,
    samples: Sequence[int] | None = None,
    ages: Sequence[int] | None = None,
    entropy: Numbers | None = None,
    proximal: Numbers | None = None,
    reference: Numbers | None = None,
    trajectories: int | None = None,
) -> Tokens:
    """Without weights, every token weighs 1; without samples, it is a trajectory of its own."""
    size = len(current)
    return Tokens(
        current=tensor(current, gradient=True),
        behaviour=tensor(behaviour),
        advantages=tensor(advantages),
        weights=tensor([1.0] * size if weights is None else weights),
        samples=torch.tensor(range(size) if samples is None else samples, dtype=torch.int64),
        ages=torch.tensor([0] * size if ages is None else ages, dtype=torch.int64),
        entropy=tensor([0.0] * size if entropy is None else entropy),
        proximal=None if proximal is None else tensor(proximal),
        reference=None if reference is None else tensor(reference),
        trajectories=trajectories,
    )


def gradient_of(loss: Any, current: Any) -> list[float]:
    (found,) = torch.autograd.grad(loss.sum(), current)
    return [float(value) for value in found]
