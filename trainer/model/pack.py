"""A pack: rows one after another, as the tensors of one forward pass.

Positions start at 0 in every row. Log-probs are computed for trainable ids only: `predicting` holds the
indices in the pack whose hidden states predict them, one before each. A pack may end with padding, rows
that are not trained: to reach a length at which kernels are fast, or to have something to run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pool.core.rows import Row

Tensor = Any


@dataclass(frozen=True, slots=True)
class Pack:
    ids: Tensor
    positions: Tensor
    bounds: Tensor
    """Start of each row, and the end of the last: int32, as attention kernels expect it."""
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    """Number of trainable ids in each row."""
    predicting: Tensor
    targets: Tensor
    temperatures: Tensor

    @property
    def longest(self) -> int:
        return max(self.lengths)


def make_pack(rows: "Sequence[Row]", device: Any, padding: Sequence[int] = ()) -> Pack:
    """`padding` has the lengths of rows to add that are not trained."""
    trained = np.concatenate([row.trainable for row in rows] or [np.zeros(0, np.bool_)])
    indices = np.flatnonzero(trained)
    lengths = [*map(len, rows), *padding]
    ids = np.concatenate([*(row.ids for row in rows), np.zeros(sum(padding), np.int32)])
    return Pack(
        ids=_to_device(device, ids.astype(np.int64)),
        positions=_to_device(device, np.concatenate([np.arange(length) for length in lengths])),
        bounds=_to_device(device, np.cumsum([0, *lengths], dtype=np.int32)),
        lengths=tuple(lengths),
        counts=(*(int(row.trainable.sum()) for row in rows), *(0 for _ in padding)),
        predicting=_to_device(device, indices - 1),
        targets=_to_device(device, ids[indices].astype(np.int64)),
        temperatures=_to_device(device, trained_values(rows, "temperatures")),
    )


def trained_values(rows: "Sequence[Row]", name: str) -> NDArray[Any]:
    """The values of one array of the rows, at the trainable ids only."""
    values = [getattr(row, name)[row.trainable] for row in rows]
    return np.concatenate(values) if values else np.zeros(0, np.float32)


def padding_to(tokens: int, multiple: int) -> tuple[int, ...]:
    missing = -tokens % multiple
    return (missing,) if missing else ()


def _to_device(device: Any, array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
