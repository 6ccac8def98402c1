"""Finds, by trying, the fastest execution mode of a model whose results equal those of transformers.

Packing is correct only if no row sees another. A model may bypass our attention kernels, a layer may
carry state along (linear attention, state spaces), a head may scale its logits. Instead of keeping a
list of such models, every model is tested: two rows are packed, and the log-probs of the second must
not depend on the first and must equal those that the model computes for the row alone. If no mode
passes, rows are run one by one.

Trees are tested in the same way, against the same rows without shared ids. If they fail (with a sliding
window, for example), rows are packed whole.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pool.core.rows import Row, plain_row
from trainer.model import attention
from trainer.model.pack import make_pack, padding_to
from trainer.model.packed import ExecutionMode, PackedModel
from trainer.model.visibility import BLOCK

log = logging.getLogger(__name__)

LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config fields of models that change their logits, perhaps by too little to show in a few ids."""
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Mean difference of log-probs that rounding explains. In bf16 logits have steps of 0.1."""
LEAKAGE = 8 * torch.finfo(torch.float32).eps
TREE = (0, 120, 80, 0)
"""How many ids each row of the tested trees shares with the one before it."""
TREE_ROW = 160
"""Length of these rows; together they fill several blocks of flex attention."""


def find_execution_mode(model: PackedModel, dtype: Any, device: Any) -> ExecutionMode:
    """Every rank of a sharded model has to call it."""
    with torch.no_grad():
        mode = _find_packing(model, dtype, device)
    with_trees = replace(mode, trees=attention.tree_kernel(device))
    is_usable = mode.supports_trees and _trees_work(model, with_trees, dtype, device)
    return with_trees if is_usable else mode


def _find_packing(model: PackedModel, dtype: Any, device: Any) -> ExecutionMode:
    ids = _random_ids(model, 24)
    first, other, second = (plain_row(part) for part in np.split(ids, [8, 16]))
    expected = _logprobs(model, [second], ExecutionMode("single", "full"), device)
    for mode in _candidates(model, device, dtype):
        try:
            after_first = _logprobs(model, [first, second], mode, device)
            after_other = _logprobs(model, [other, second], mode, device)
        except Exception as error:  # whatever a model does with a pack, it can be run without
            log.info("execution mode %s does not work: %s", mode, error)
            continue
        ours, other_ours = after_first[-len(expected) :], after_other[-len(expected) :]
        leakage = float((ours - other_ours).abs().max())
        difference = float((ours - expected).abs().mean())
        log.info(
            "execution mode %s: rows influence each other by %.2g, log-probs differ by %.2g from "
            "those of a single row",
            mode, leakage, difference,
        )  # fmt: skip
        if leakage <= LEAKAGE and difference <= ROUNDING[dtype]:
            return mode
    return ExecutionMode("single", "full")


def _trees_work(model: PackedModel, mode: ExecutionMode, dtype: Any, device: Any) -> bool:
    rows, changed = _rows_of_tree(model), _rows_of_tree(model)
    changed[1].ids[-8:] = changed[0].ids[-8:]  # the end of one branch, which no other row sees
    try:
        with torch.no_grad():
            expected = _logprobs(model, rows, mode, device)
            after_change = _logprobs(model, changed, mode, device, TREE)
        ours = _logprobs(model, rows, mode, device, TREE)
        if ours.requires_grad:  # not every kernel has a backward pass for every model
            ours.sum().backward()
            model.zero_grad(set_to_none=True)
    except Exception as error:  # whatever a model does with a tree, it can be run without
        log.info("execution mode %s does not work: %s", mode, error)
        return False
    others = torch.arange(len(ours), device=ours.device) // (TREE_ROW - 1) != 1
    leakage = float((ours.detach() - after_change)[others].abs().max())
    difference = float((ours.detach() - expected).abs().mean())
    log.info(
        "execution mode %s: branches influence each other by %.2g, log-probs differ by %.2g from "
        "those of whole rows",
        mode, leakage, difference,
    )  # fmt: skip
    return leakage <= LEAKAGE and difference <= ROUNDING[dtype]


def _rows_of_tree(model: PackedModel) -> list[Row]:
    ids = _random_ids(model, len(TREE) * TREE_ROW).reshape(len(TREE), TREE_ROW)
    for row, shared in enumerate(TREE[1:], 1):
        ids[row, :shared] = ids[row - 1, :shared]
    return [plain_row(row) for row in ids]


def _random_ids(model: PackedModel, count: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    vocabulary = model.causal.config.vocab_size
    return np.random.default_rng(0).integers(0, vocabulary, count).astype(np.int32)


def _candidates(model: PackedModel, device: Any, dtype: Any) -> list[ExecutionMode]:
    config = model.causal.config
    has_plain_logits = all(getattr(config, name, None) in (None, 1, 1.0) for name in LOGIT_CHANGES)
    kernels = (*attention.kernels(device, dtype), "single")
    heads = ("chunked", "full") if has_plain_logits else ("full",)
    return [ExecutionMode(kernel, head) for kernel in kernels for head in heads]  # type: ignore[arg-type]


def _logprobs(
    model: PackedModel,
    rows: list[Row],
    mode: ExecutionMode,
    device: Any,
    shared: Sequence[int] | None = None,
) -> Any:
    padding = padding_to(sum(map(len, rows)) - sum(shared), BLOCK) if shared else ()
    return model(make_pack(rows, device, padding, shared), mode)[0].float()
