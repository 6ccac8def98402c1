"""A pack: rows one after the other, as the tensors of one forward pass.

Positions begin again at 0 in every row. Only the trainable ids have a log-prob: `predicting` are the
places in the pack whose hidden state predicts them, one before each. A pack may end in filling, a
row that nothing is trained on: to reach a length that kernels like, or to have something to run.
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
    """Where each row begins, and the end of the last: int32, as attention kernels take it."""
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    """Trainable ids of each row."""
    predicting: Tensor
    targets: Tensor
    temperatures: Tensor

    @property
    def longest(self) -> int:
        return max(self.lengths)


def pack_of(rows: "Sequence[Row]", device: Any, filling: Sequence[int] = ()) -> Pack:
    """`filling`: lengths of rows to add that are not trained."""
    trained = np.concatenate([row.trainable for row in rows] or [np.zeros(0, np.bool_)])
    places = np.flatnonzero(trained)
    lengths = [*map(len, rows), *filling]
    ids = np.concatenate([*(row.ids for row in rows), np.zeros(sum(filling), np.int32)])
    return Pack(
        ids=_on(device, ids.astype(np.int64)),
        positions=_on(device, np.concatenate([np.arange(length) for length in lengths])),
        bounds=_on(device, np.cumsum([0, *lengths], dtype=np.int32)),
        lengths=tuple(lengths),
        counts=(*(int(row.trainable.sum()) for row in rows), *(0 for _ in filling)),
        predicting=_on(device, places - 1),
        targets=_on(device, ids[places].astype(np.int64)),
        temperatures=_on(device, trained_values(rows, "temperatures")),
    )


def trained_values(rows: "Sequence[Row]", name: str) -> NDArray[Any]:
    """One array of the rows, at the trainable ids only."""
    values = [getattr(row, name)[row.trainable] for row in rows]
    return np.concatenate(values) if values else np.zeros(0, np.float32)


def filling_to(tokens: int, multiple: int) -> tuple[int, ...]:
    missing = -tokens % multiple
    return (missing,) if missing else ()


def _on(device: Any, array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
