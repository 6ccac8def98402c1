"""Everything that the next training step depends on besides its batch and settings: weights, AdamW's
averages, the number of steps and the random state.

Weights and averages may be sharded: each rank saves and restores its own part, in place, so that no
rank ever holds more than its shards.
"""

from typing import Any

import torch

from trainer.checkpoints.saved_state import SavedState
from trainer.learner import Learner
from trainer.model.offload import empty_average

Tensor = Any

STEPS, RANDOM_CPU, RANDOM_CUDA = "steps", "random.cpu", "random.cuda"


def state_tensors(learner: Learner) -> dict[str, Tensor]:
    """The tensors to save, not copied. What all ranks have alike, rank 0 saves."""
    tensors: dict[str, Tensor] = {}
    if learner.ranks.rank == 0:
        tensors |= {STEPS: torch.tensor(learner.steps), RANDOM_CPU: torch.get_rng_state()}
        if learner.device.type == "cuda":
            tensors[RANDOM_CUDA] = torch.cuda.get_rng_state(learner.device)
    for name, weight in learner.trained.parameters.items():
        tensors[weight_key(name)] = weight.detach()
        for field, value in learner.optimiser.state.get(weight, {}).items():
            if field != "step" or learner.ranks.rank == 0:
                tensors[_optimiser_key(field, name)] = value
    return tensors


def restore_state(learner: Learner, saved: SavedState) -> None:
    steps, random = torch.tensor(0), torch.get_rng_state()
    tensors: dict[str, Tensor] = {STEPS: steps, RANDOM_CPU: random}
    if learner.device.type == "cuda" and RANDOM_CUDA in saved.shapes:
        tensors[RANDOM_CUDA] = torch.cuda.get_rng_state(learner.device)
    for name, weight in learner.trained.parameters.items():
        tensors[weight_key(name)] = weight.detach()
        learner.optimiser.state[weight].clear()
        for field in ("step", "exp_avg", "exp_avg_sq"):
            key = _optimiser_key(field, name)
            if key in saved.shapes:  # a weight that never had a gradient has none of them
                tensors[key] = _empty(field, weight, learner)
                learner.optimiser.state[weight][field] = tensors[key]
    saved.read_into(tensors)
    learner.steps = int(steps)
    torch.set_rng_state(random)
    if RANDOM_CUDA in tensors:
        torch.cuda.set_rng_state(tensors[RANDOM_CUDA], learner.device)
    learner.trained.publish()


def weight_key(name: str) -> str:
    return f"weight.{name}"


def _optimiser_key(field: str, name: str) -> str:
    return f"optimiser.{field}.{name}"


def _empty(field: str, weight: Tensor, learner: Learner) -> Tensor:
    """Memory for a value of AdamW: the step counter, or an average."""
    if field == "step":
        return torch.zeros((), device=learner.device)
    return empty_average(weight, is_offloaded=learner.execution.offload_optimiser)
