"""Small models of random weights, and batches for them."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers

from pool.core.rows import Row
from trainer.data.batch import Batch
from trainer.data.sample import Sample

VOCABULARY = 96
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}


def model(kind: str = "Qwen2", **fields: Any) -> Any:
    """The same weights every time, larger than usual, so that attention is not nearly flat."""
    config = getattr(transformers, f"{kind}Config")
    causal = getattr(transformers, f"{kind}ForCausalLM")
    tied = {"tie_word_embeddings": kind == "Qwen2"}
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return causal(config(**(SHAPE | {"initializer_range": 0.2} | tied | fields)))


def mamba() -> Any:
    """Carries a state from id to id, and so over the bounds of packed rows."""
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4
    )
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return transformers.MambaForCausalLM(config)


def row(length: int, seed: int, temperature: float = 1.0, prompt: int = 3) -> Row:
    rng = np.random.default_rng(seed)
    sampled = np.arange(length) >= prompt
    sampled[length // 2 : length // 2 + 2] = False
    behaviour = rng.normal(-4.5, 0.3, length)
    return Row(
        ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        trainable=sampled,
        behaviour=np.where(sampled, behaviour, 0).astype(np.float32),
        versions=np.where(sampled, 3, -1).astype(np.int32),
        temperatures=np.where(sampled, temperature, 1).astype(np.float32),
    )


def batch(samples: int = 8, seed: int = 0, temperature: float = 1.0) -> Batch:
    """Some trajectories have two rows."""
    rng = np.random.default_rng(seed)
    return Batch(
        version=4,
        seed=seed,
        groups=-(-samples // 2),
        samples=[
            Sample(
                trajectory_uid=str(place),
                group=place // 2,
                reward=0.0,
                truncated=False,
                rows=tuple(
                    row(int(rng.integers(8, 40)), 100 * place + number + seed, temperature)
                    for number in range(1 + place % 2)
                ),
            )
            for place in range(samples)
        ],
        advantages=rng.normal(size=samples).tolist(),
    )


def branched_batch(seed: int = 0) -> Batch:
    """Two groups of five trajectories. They share the prompt, two of them also the first sampled ids
    (as branches of one run do), and two are the same."""
    rng = np.random.default_rng(seed)
    samples = []
    for place in range(2):
        rows = [
            row(int(rng.integers(34, 44)), seed + 10 * place + n, 0.7 + n / 10, 20)
            for n in range(4)
        ]
        for other in rows[1:]:
            other.ids[:20] = rows[0].ids[:20]
        rows[2].ids[20:28] = rows[1].ids[20:28]
        rows.append(replace(row(len(rows[0]), seed + 99, 1.3, 20), ids=rows[0].ids))
        samples += [
            Sample(f"{place}-{number}", place, 0.0, False, (each,))
            for number, each in enumerate(rows)
        ]
    advantages = rng.normal(size=len(samples)).tolist()
    return Batch(version=4, seed=seed, groups=2, samples=samples, advantages=advantages)
