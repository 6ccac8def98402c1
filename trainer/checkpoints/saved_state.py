"""The tensors of a checkpoint on disk, written and read with torch.distributed.checkpoint.

Each rank writes a safetensors file with its shards, whose header says which part of each tensor it
holds. A reader takes from all files the parts that it needs, so any number of ranks can read what any
other number has written. A file with whole tensors is read the same way.
"""

import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from servicekit.errors import Fatal

Tensor = Any

FILE_BYTES = 2**30
"""Most bytes in one file of a rank: torch holds a second copy of a file while it writes it."""

# torch says this whenever a process saves or loads alone, which is what we ask for.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def write_shards(folder: Path, tensors: Mapping[str, Tensor], group: Any = None) -> None:
    """Writes this rank's shards to disk. With several ranks, all have to call it with a process group
    that nothing else uses at the time; it returns when all files are written."""
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_files(tensors), save_distributed=True
    )
    writer.per_thread_copy_ahead = 0  # copying ahead is for tensors on a GPU
    try:
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise OSError(_first_failure(error)) from error


class SavedState:
    """The tensors in the folder of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The name and whole shape of each tensor."""
        try:
            metadata = HuggingFaceStorageReader(str(self.folder)).read_metadata()
        except (OSError, SafetensorError) as error:
            raise self._unreadable(error) from error
        if not metadata.state_dict_metadata:
            raise self._unreadable("it has no safetensors files")
        return {name: entry.size for name, entry in metadata.state_dict_metadata.items()}

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites the tensors, or this rank's shards of them, with what was saved under their
        names."""
        for name, tensor in tensors.items():
            if self.shapes.get(name) != tensor.shape:
                raise Fatal(
                    f"checkpoint {self.folder} does not fit the model: {name} has the shape "
                    f"{_shape(self.shapes.get(name))} there and {_shape(tensor.shape)} in the model"
                )
        reader = HuggingFaceStorageReader(str(self.folder))
        try:
            # Ranks need not agree about reading, so none waits for another.
            dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise self._unreadable(_first_failure(error)) from error

    def read(self, name: str) -> Tensor:
        """A whole tensor on the CPU, in float32."""
        tensor = torch.empty(self.shapes[name])
        self.read_into({name: tensor})
        return tensor

    def _unreadable(self, reason: object) -> Fatal:
        return Fatal(
            f"checkpoint {self.folder} cannot be read: {reason}; "
            "move it away to continue from the one before"
        )


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of the file that each tensor is written to, from 1. All ranks use those of rank 0."""
    numbers, size = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + size // FILE_BYTES
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        size += local.numel() * local.element_size()
    return numbers


def _first_failure(error: CheckpointException) -> str:
    """The first rank that failed, and why."""
    rank, (failure, _) = next(iter(sorted(error.failures.items())))
    return f"{failure} (rank {rank})" if rank else str(failure)


def _shape(size: torch.Size | None) -> str:
    return "of nothing" if size is None else str(tuple(size))
