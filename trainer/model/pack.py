"""A pack: rows one after another, as the tensors of one forward pass.

A row may share its first ids with the row before it; these are in the pack once, as part of the
earlier row. The pack then holds trees in depth-first order: the position of an id is its depth, and the
ids that see it are those from itself to the end of its subtree.

Log-probs are computed for the trainable ids of every row: `predicting` holds the indices in the pack
whose hidden states predict them. Where rows part, one index predicts an id of each of them. A pack may
end with padding, rows that are not trained: to reach a length at which kernels are fast, or to have
something to run.
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
    """Start of each tree, and the end of the last: int32, as attention kernels expect it."""
    lengths: tuple[int, ...]
    """Number of ids of each tree; without shared ids, each row is a tree."""
    counts: tuple[int, ...]
    """Number of trainable ids in each row."""
    predicting: Tensor
    targets: Tensor
    temperatures: Tensor
    ends: NDArray[np.int32]
    """For each id, the index at which its subtree ends."""
    is_shared: bool
    """Whether rows share ids."""

    @property
    def longest(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the ids of rows are in a pack."""

    paths: list[NDArray[np.int64]]
    """For each row, the indices of its ids."""
    positions: NDArray[np.int64]
    ends: NDArray[np.int32]
    starts: list[int]
    """Index at which each tree starts."""


def make_pack(
    rows: "Sequence[Row]",
    device: Any,
    padding: Sequence[int] = (),
    shared: Sequence[int] | None = None,
) -> Pack:
    """`shared` says how many ids each row shares with the one before it, 0 if left out; rows are in
    depth-first order. `padding` has the lengths of rows to add that are not trained."""
    shared = [0] * len(rows) if shared is None else shared
    layout = _lay_out([*map(len, rows), *padding], [*shared, *(0 for _ in padding)])
    own = [row.ids[start:] for row, start in zip(rows, shared, strict=True)]
    ids = np.concatenate([*own, np.zeros(sum(padding), np.int32)])
    targets = [np.flatnonzero(row.trainable) for row in rows]
    before = [path[places - 1] for path, places in zip(layout.paths, targets, strict=False)]
    bounds = np.array([*layout.starts, len(ids)], np.int32)
    return Pack(
        ids=to_device(ids.astype(np.int64), device),
        positions=to_device(layout.positions, device),
        bounds=to_device(bounds, device),
        lengths=tuple(np.diff(bounds).tolist()),
        counts=(*map(len, targets), *(0 for _ in padding)),
        predicting=to_device(np.concatenate([np.zeros(0, np.int64), *before]), device),
        targets=to_device(trained_values(rows, "ids").astype(np.int64), device),
        temperatures=to_device(trained_values(rows, "temperatures"), device),
        ends=layout.ends,
        is_shared=any(shared),
    )


def trained_values(rows: "Sequence[Row]", name: str) -> NDArray[Any]:
    """The values of one array of the rows, at the trainable ids only."""
    values = [getattr(row, name)[row.trainable] for row in rows]
    return np.concatenate(values) if values else np.zeros(0, np.float32)


def padding_to(tokens: int, multiple: int) -> tuple[int, ...]:
    missing = -tokens % multiple
    return (missing,) if missing else ()


def _lay_out(lengths: Sequence[int], shared: Sequence[int]) -> _Layout:
    size = sum(lengths) - sum(shared)
    positions, ends = np.empty(size, np.int64), np.empty(size, np.int32)
    paths: list[NDArray[np.int64]] = []
    path, start, starts = np.zeros(0, np.int64), 0, []
    for length, common in zip(lengths, shared, strict=True):
        ends[path[common:]] = start  # what this row does not share is behind it
        end = start + length - common
        path = np.concatenate([path[:common], np.arange(start, end)])
        positions[start:end] = np.arange(common, length)
        if not common:
            starts.append(start)
        paths.append(path)
        start = end
    ends[path] = size
    return _Layout(paths, positions, ends, starts)


def to_device(array: NDArray[Any], device: Any) -> Tensor:
    """A copy on the device, from pinned memory: other memory is copied when the device has nothing to
    do."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
