"""What the bits of a training step depend on, besides weights, batch and settings."""

import json
from typing import Any

import torch

from trainer.learner import Learner


def machine(learner: Learner) -> dict[str, Any]:
    on_cuda = learner.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(learner.device) if on_cuda else "cpu",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "dtype": str(learner.dtype).removeprefix("torch."),
        "ranks": learner.ranks.world,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


def gives_the_same_bits(recorded: str, here: dict[str, Any], deterministic: bool) -> bool:
    """Whether a step that was made on one machine comes out bit for bit the same on the other."""
    steady = here["ranks"] == 1 and (here["device"] == "cpu" or deterministic)
    return steady and bool(json.loads(recorded) == here)
