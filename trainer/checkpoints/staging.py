"""A copy of the training state in CPU memory; a checkpoint is written from it while training goes on.

It holds this rank's shards only. The memory is kept from one checkpoint to the next, because allocating
pinned memory, from which a GPU copies at full speed, takes longer than the copy.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

Tensor = Any


class StagedState:
    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._mesh: Any = None

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies the tensors, which may change afterwards; the copy is valid until the next call."""
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        copies = {name: self._copy(name, tensor.detach()) for name, tensor in tensors.items()}
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return self._buffer(name, tensor)
        return DTensor.from_local(
            self._buffer(name, tensor.to_local()),
            self._cpu_mesh(tensor.device_mesh),
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def _cpu_mesh(self, mesh: Any) -> Any:
        """The same ranks, for tensors on the CPU: torch would move a tensor to its mesh's device."""
        if mesh.device_type == "cpu":
            return mesh
        if self._mesh is None:
            self._mesh = dist.device_mesh.init_device_mesh("cpu", tuple(mesh.shape))
        return self._mesh
