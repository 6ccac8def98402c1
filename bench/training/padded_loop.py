"""The usual training loop, for comparison: micro-batches of padded rows, all logits, log-softmax."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Tensor = Any
CLIP_LOW, CLIP_HIGH = 0.8, 1.28


def step(model: Any, optimiser: Any, batch: Any, rows_at_once: int, device: Any) -> float:
    """PPO's clipped loss on the mean of trainable tokens."""
    trained = sum(int(row.trainable.sum()) for sample in batch.samples for row in sample.rows)
    total = 0.0
    for start in range(0, len(batch.samples), rows_at_once):
        some = slice(start, start + rows_at_once)
        rows = [sample.rows[0] for sample in batch.samples[some]]
        loss = _loss(model, rows, batch.advantages[some], device) / trained
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return total


def _loss(model: Any, rows: Sequence[Any], advantages: Sequence[float], device: Any) -> Tensor:
    ids, mask, trainable, behaviour = padded(rows, device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
    ratio = (logprobs - behaviour[:, 1:]).exp()
    weights = torch.tensor(advantages, dtype=torch.float32, device=device)[:, None]
    clipped = ratio.clamp(CLIP_LOW, CLIP_HIGH) * weights
    return -(torch.minimum(ratio * weights, clipped) * trainable[:, 1:]).sum()


def padded(rows: Sequence[Any], device: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, attention mask, trainable and behaviour log-probs, all as long as the longest row."""
    longest = max(len(row.ids) for row in rows)

    def filled(values: Callable[[Any], Any], dtype: Any) -> Tensor:
        table = np.zeros((len(rows), longest), dtype)
        for index, row in enumerate(rows):
            table[index, : len(row.ids)] = values(row)
        return torch.from_numpy(table).to(device)

    return (
        filled(lambda row: row.ids, np.int64),
        filled(lambda row: np.ones(len(row.ids)), np.int64),
        filled(lambda row: row.trainable, np.float32),
        filled(lambda row: row.behaviour, np.float32),
    )
