"""The properties of the machine that the bits of a training step depend on."""

import json
from typing import Any

import torch

from trainer.learner import Learner


def describe_machine(learner: Learner) -> dict[str, Any]:
    on_cuda = learner.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(learner.device) if on_cuda else "cpu",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "dtype": str(learner.dtype).removeprefix("torch."),
        "ranks": learner.ranks.world,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "execution": learner.execution.model_dump(),
    }


def is_bit_exact(recorded: str, machine: dict[str, Any], deterministic: bool) -> bool:
    """Whether a step trained on the recorded machine gives the same bits on this one. Machines recorded
    without execution settings used those of their Decision, which whoever reproduces them uses too."""
    is_steady = machine["ranks"] == 1 and (machine["device"] == "cpu" or deterministic)
    return is_steady and {"execution": machine["execution"], **json.loads(recorded)} == machine
