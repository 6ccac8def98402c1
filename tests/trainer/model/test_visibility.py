"""Masks made from the ends of subtrees, against trying all pairs of ids."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from pool.core.rows import plain_row
from trainer.model.pack import Pack, make_pack
from trainer.model.visibility import block_mask, tree_masks

CPU = torch.device("cpu")


def pack_of(lengths: list[int], shared: list[int], padding: tuple[int, ...] = ()) -> Pack:
    ids = np.zeros(max(lengths), np.int32)
    return make_pack([plain_row(ids[:length]) for length in lengths], CPU, padding, shared)


def ancestors(lengths: list[int], shared: list[int]) -> Any:
    """For each id of the pack, a row that holds it, and which ids that row consists of."""
    seen, path, rows = 0, list[int](), []
    for length, common in zip(lengths, shared, strict=True):
        path = path[:common] + list(range(seen, seen + length - common))
        seen += length - common
        rows.append(list(path))
    mask = torch.zeros(seen, seen, dtype=torch.bool)
    for row in rows:
        for depth, place in enumerate(row):
            mask[place, row[: depth + 1]] = True
    return mask


TREES = [
    ([5, 4, 6], [0, 0, 0]),
    ([5, 7, 7, 4], [0, 3, 5, 0]),
    ([4, 4, 9], [0, 4, 4]),
    ([300, 290, 500, 200, 128], [0, 256, 100, 0, 64]),
]


@pytest.mark.parametrize(("lengths", "shared"), TREES)
def test_an_id_sees_its_ancestors(lengths: list[int], shared: list[int]) -> None:
    pack, expected = pack_of(lengths, shared), ancestors(lengths, shared)
    found = torch.zeros_like(expected)
    start = 0
    for length, mask in zip(pack.lengths, tree_masks(pack), strict=True):
        part = slice(start, start + length)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        found[part, part] = causal if mask is None else mask
        start += length
    assert torch.equal(found, expected)
    assert pack.positions.tolist() == (expected.sum(1) - 1).tolist()


@pytest.mark.parametrize(("lengths", "shared"), TREES)
def test_blocks_are_those_that_torch_finds_by_trying_all_pairs(
    lengths: list[int], shared: list[int]
) -> None:
    missing = -(sum(lengths) - sum(shared)) % 128
    pack = pack_of(lengths, shared, (missing,) if missing else ())
    ours = block_mask(pack)
    theirs = create_block_mask(ours.mask_mod, None, None, *ours.seq_lengths, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
