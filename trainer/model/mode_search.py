"""Finds, by trying, the fastest execution mode of a model whose results equal those of transformers.

Packing is correct only if no row sees another. A model may bypass our attention kernels, a layer may
carry state along (linear attention, state spaces), a head may scale its logits. Instead of keeping a
list of such models, every model is tested: two rows are packed, and the log-probs of the second must
not depend on the first and must equal those that the model computes for the row alone. If no mode
passes, rows are run one by one.
"""

import logging
from typing import Any

import numpy as np
import torch

from pool.core.rows import Row, plain_row
from trainer.model import attention
from trainer.model.pack import make_pack
from trainer.model.packed import ExecutionMode, PackedModel

log = logging.getLogger(__name__)

LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config fields of models that change their logits, perhaps by too little to show in a few ids."""
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Mean difference of log-probs that rounding explains. In bf16 logits have steps of 0.1."""


def find_execution_mode(model: PackedModel, dtype: Any, device: Any) -> ExecutionMode:
    """Every rank of a sharded model has to call it."""
    ids = np.random.default_rng(0).integers(0, model.causal.config.vocab_size, 24)
    first, other, second = (plain_row(part.astype(np.int32)) for part in np.split(ids, [8, 16]))
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
        if leakage <= 8 * torch.finfo(torch.float32).eps and difference <= ROUNDING[dtype]:
            return mode
    return ExecutionMode("single", "full")


def _candidates(model: PackedModel, device: Any, dtype: Any) -> list[ExecutionMode]:
    config = model.causal.config
    has_plain_logits = all(getattr(config, name, None) in (None, 1, 1.0) for name in LOGIT_CHANGES)
    kernels = (*attention.kernels(device, dtype), "single")
    heads = ("chunked", "full") if has_plain_logits else ("full",)
    return [ExecutionMode(kernel, head) for kernel in kernels for head in heads]  # type: ignore[arg-type]


def _logprobs(model: PackedModel, rows: list[Row], mode: ExecutionMode, device: Any) -> Any:
    with torch.no_grad():
        return model(make_pack(rows, device), mode)[0].float()
