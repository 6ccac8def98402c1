"""The optimizer, the result of one of its steps, and the metrics of all steps of a batch.

A gradient that is not finite would make every weight NaN, and Adam's averages with them. Such a step is
skipped: the version is made without it, and the Outcome says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch

from trainer.algorithm.statistics import PackStatistics
from trainer.model.offload import OffloadedAdamW
from trainer.model.settings import ExecutionSettings, LearnerSettings
from trainer.model.sharding import TrainedParameters

Tensor = Any


@dataclass(frozen=True, slots=True)
class OptimiserStep:
    statistics: PackStatistics
    norm: float
    """Norm of the gradient before clipping, over all ranks."""

    @property
    def is_skipped(self) -> bool:
        return not math.isfinite(self.norm)


def step_metrics(steps: Sequence[OptimiserStep]) -> dict[str, float]:
    """Metrics of a batch over all ranks; every rank has to call it."""
    statistics = reduce(add, (step.statistics for step in steps)).over_ranks()
    skipped = [step for step in steps if step.is_skipped]
    applied = [step.norm for step in steps if not step.is_skipped]
    return statistics.metrics() | {
        "grad_norm": max(applied) if applied else skipped[0].norm,
        "skipped_steps": float(len(skipped)),
    }


def make_optimiser(
    trained: TrainedParameters, settings: LearnerSettings, execution: ExecutionSettings, device: Any
) -> Any:
    weights = list(trained.parameters.values())
    kinds = [w for w in weights if w.ndim > 1], [w for w in weights if w.ndim <= 1]
    groups = [
        {"params": kind, "weight_decay": weight_decay(settings, kind)} for kind in kinds if kind
    ]
    adamw = OffloadedAdamW if execution.offload_optimiser else torch.optim.AdamW
    return adamw(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=device.type == "cuda",
    )


def weight_decay(settings: LearnerSettings, weights: list[Tensor]) -> float:
    """Norms and biases have no weight decay."""
    return settings.weight_decay if weights[0].ndim > 1 else 0.0
