"""The trainer's weights as a stream of named tensors that can be read any number of times.

`metadata` and iteration agree element by element: receivers allocate and split their buffers by the
metadata. The interface is that of vLLM's `WeightSource`, so that vLLM's own senders accept it too. Tied
parameters appear once, under the name that a checkpoint uses.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


class WeightSource(Protocol):
    def metadata(self) -> list[Parameter]: ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class AdapterSource(WeightSource, Protocol):
    """The weights of LoRA adapters; matrix A or B of a module is MODULE.lora_A.weight or B, with the
    scaling in B."""

    @property
    def rank(self) -> int: ...


class ModuleSource:
    """The parameters of a module. Shards are gathered one by one, and every rank must take part."""

    def __init__(self, module: Any, dtype: torch.dtype | None = None) -> None:
        self._module = module
        self._dtype = dtype

    def metadata(self) -> list[Parameter]:
        return [
            Parameter(name, self._dtype or tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._module.named_parameters()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._module.named_parameters():
            gather = getattr(tensor, "full_tensor", None)
            full = (gather() if gather else tensor).detach()
            yield name, full if self._dtype is None else full.to(self._dtype)


def total_bytes(source: WeightSource) -> int:
    return sum(parameter.bytes for parameter in source.metadata())
