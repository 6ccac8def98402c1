"""The weights of LoRA adapters on their way to engines: by themselves, or merged into the model's own.

A merged weight is rounded up or down at random, more often to the nearer side. At a small learning rate
an adapter changes a weight by much less than the distance between two bf16 numbers, and rounding to the
nearest one would drop most of the change. Rounded at random, it arrives in full on average. The seed is
the number of optimizer steps, so the same weights are rounded in the same way each time they are sent.
"""

import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from servicekit.errors import Fatal
from trainer.model.sharding import TrainedParameters, gather
from trainer.weights.source import Parameter

Tensor = Any
FLOAT32_DIGITS = 23
"""Bits of a float32 number after its leading one."""


class UnsendableAdapter(Fatal):
    """An adapter belongs to a module that checkpoints of the model do not have."""


def find_adapters(causal: Any) -> dict[str, float]:
    """The names of the modules that have an adapter, and the scaling of each."""
    return {
        name: float(module.scaling["default"])
        for name, module in causal.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "scaling")
    }


def parameter_name(module: str, matrix: str) -> str:
    """The name in the model of matrix A or B of a module's adapter."""
    return f"{module}.lora_{matrix}.default.weight"


def round_at_random(exact: Tensor, dtype: torch.dtype, seed: str) -> Tensor:
    """Rounds float32 numbers up or down so that their expected value does not change. Numbers that the
    type can hold stay as they are."""
    dropped = FLOAT32_DIGITS + round(math.log2(torch.finfo(dtype).eps))
    if dropped <= 0:
        return exact.to(dtype)
    generator = torch.Generator(exact.device).manual_seed(zlib.crc32(seed.encode()))
    noise = torch.randint(
        1 << dropped, exact.shape, generator=generator, device=exact.device, dtype=torch.int32
    )
    # The bits of a float are ordered like its magnitude, so a carry leads to the next number.
    bits = (exact.view(torch.int32) + noise) & -(1 << dropped)
    return bits.view(torch.float32).to(dtype)


class AdapterWeights:
    """The adapters of a model as `weights/` sends them to engines that have LoRA layers.

    They are float32 masters under the names that checkpoints of the model use, with the scaling in
    matrix B; an engine rounds them to the type of its LoRA layers. Every rank has to iterate, since
    shards are gathered.
    """

    def __init__(self, causal: Any, trained: TrainedParameters) -> None:
        # Names in the packed model start with the name of its only child.
        masters = {name.partition(".")[2]: weight for name, weight in trained.parameters.items()}
        self._matrices: dict[str, tuple[Tensor, float]] = {}
        for module, scaling in find_adapters(causal).items():
            saved = _saved_name(causal, module)
            for matrix, scale in (("A", 1.0), ("B", scaling)):
                master = masters[parameter_name(module, matrix)]
                self._matrices[f"{saved}.lora_{matrix}.weight"] = master, scale

    @property
    def rank(self) -> int:
        """The largest rank of an adapter."""
        return max(int(min(matrix.shape)) for matrix, _ in self._matrices.values())

    def metadata(self) -> list[Parameter]:
        return [
            Parameter(name, torch.float32, tuple(matrix.shape))
            for name, (matrix, _) in self._matrices.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, (matrix, scale) in self._matrices.items():
            yield name, gather(matrix).float() * scale


def _saved_name(causal: Any, module: str) -> str:
    """The module's name in checkpoints of the model."""
    weight = torch.empty(causal.get_submodule(module).weight.shape, device="meta")
    saved = list(revert_weight_conversion(causal, {f"{module}.weight": weight}))
    if len(saved) != 1:
        raise UnsendableAdapter(
            f"the adapter of {module} cannot be sent, because checkpoints store its weight as "
            f"{len(saved)} tensors; leave the module out of --lora-targets"
        )
    return str(saved[0]).removesuffix(".weight")
