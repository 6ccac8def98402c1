"""The trainer's weights, as a stream of named tensors that can be read again and again.

`metadata` and iteration agree element for element: receivers size their buffers by the first and cut
them by it. The shape is that of vLLM's `WeightSource`, so that its own senders take these as well.
Tied parameters come once, under the name under which a checkpoint has them.
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


class Source(Protocol):
    def metadata(self) -> list[Parameter]: ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class ModuleSource:
    """A module's parameters; shards are gathered one by one, which every rank must take part in."""

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
            whole = (gather() if gather else tensor).detach()
            yield name, whole if self._dtype is None else whole.to(self._dtype)


def total_bytes(source: Source) -> int:
    return sum(parameter.bytes for parameter in source.metadata())
