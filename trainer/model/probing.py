"""The fastest way to run a model that gives what transformers gives, found by trying.

Packing is right only if no row sees another. Attention may go past our kernels, a layer may carry
state along (linear attention, state spaces), a head may scale its logits: rather than a list of such
models, every model is asked. Two rows are packed; the second must come out the same whatever the
first says, and as the model itself computes it alone. What fails is run row by row.
"""

import logging
from typing import Any

import numpy as np
import torch

from pool.core.rows import Row, plain_row
from trainer.model import attention
from trainer.model.pack import pack_of
from trainer.model.packed import PackedModel, Way

log = logging.getLogger(__name__)

HEADS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Of a config: its model changes its logits, perhaps too little to be seen in a few ids."""
SAME = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Mean difference of log-probs that is rounding. In bf16 the model's own logits have steps of 0.1."""


def find_way(model: PackedModel, dtype: Any, device: Any) -> Way:
    """Every rank of a sharded model has to call it."""
    ids = np.random.default_rng(0).integers(0, model.causal.config.vocab_size, 24)
    first, other, second = (plain_row(part.astype(np.int32)) for part in np.split(ids, [8, 16]))
    alone = _ask(model, [second], Way("single", "full"), device)
    for way in _candidates(model, device, dtype):
        try:
            told = _ask(model, [first, second], way, device)
            again = _ask(model, [other, second], way, device)
        except Exception as error:  # whatever a model does with a pack, it can be run without
            log.info("%s: %s", way, error)
            continue
        apart = float((told[-len(alone) :] - again[-len(alone) :]).abs().max())
        off = float((told[-len(alone) :] - alone).abs().mean())
        log.info("%s: rows see each other by %.2g, log-probs differ by %.2g", way, apart, off)
        if apart <= 8 * torch.finfo(torch.float32).eps and off <= SAME[dtype]:
            return way
    return Way("single", "full")


def _candidates(model: PackedModel, device: Any, dtype: Any) -> list[Way]:
    config = model.causal.config
    plain = all(getattr(config, name, None) in (None, 1, 1.0) for name in HEADS)
    kernels = (*attention.kernels(device, dtype), "single")
    heads = ("chunked", "full") if plain else ("full",)
    return [Way(kernel, head) for kernel in kernels for head in heads]  # type: ignore[arg-type]


def _ask(model: PackedModel, rows: list[Row], way: Way, device: Any) -> Any:
    with torch.no_grad():
        return model(pack_of(rows, device), way)[0].float()
