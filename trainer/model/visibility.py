"""Which ids of a pack see which: an id is seen from itself to the end of its subtree.

In a pack without shared ids, every row is a tree without branches, and this is causal attention within
rows.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask

from trainer.model.pack import Pack, to_device

Tensor = Any
Ints = NDArray[np.int32]

BLOCK = 128
"""Length of the blocks that flex attention skips or computes as a whole."""


def tree_masks(pack: Pack) -> tuple[Tensor | None, ...]:
    """For each tree, which id sees which; None for a tree without branches."""
    starts = np.cumsum([0, *pack.lengths[:-1]])
    return tuple(
        _tree_mask(pack.ends[start : start + length] - start, pack.ids.device)
        for start, length in zip(starts.tolist(), pack.lengths, strict=True)
    )


def _tree_mask(ends: Ints, device: Any) -> Tensor | None:
    if (ends == len(ends)).all():
        return None
    places = np.arange(len(ends))
    sees = (places[None, :] <= places[:, None]) & (places[:, None] < ends[None, :])
    return to_device(sees, device)


def block_mask(pack: Pack) -> BlockMask:
    """The mask for flex attention.

    It is made from the ends of subtrees: torch's own function tries all pairs of ids, with memory that
    grows with the square of their number.
    """
    device, size = pack.ids.device, len(pack.ends)
    ends = to_device(pack.ends, device)

    def is_visible(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    lists = [to_device(array, device)[None, None] for array in block_lists(pack.ends)]
    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=BLOCK, mask_mod=is_visible, seq_lengths=(size, size)
    )


def block_lists(ends: Ints) -> list[Ints]:
    """For each block of queries, the number and the indices of key blocks that it sees in part, and of
    those that it sees as a whole."""
    blocks = -(-len(ends) // BLOCK)
    by_block = np.pad(ends, (0, blocks * BLOCK - len(ends))).reshape(blocks, BLOCK)
    starts = np.arange(blocks)[:, None] * BLOCK
    earlier = np.tri(blocks, k=-1, dtype=np.bool_)
    full = earlier & (by_block.min(axis=1)[None, :] >= starts + BLOCK)
    seen = earlier & (by_block.max(axis=1)[None, :] > starts)
    partial = (seen & ~full) | np.eye(blocks, dtype=np.bool_)
    return [*_listed(partial), *_listed(full)]


def _listed(chosen: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """For each line of a table, how many columns are chosen, and these columns before the others."""
    columns = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    return chosen.sum(axis=1).astype(np.int32), columns
