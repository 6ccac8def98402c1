"""Models of real sizes with random weights: a folder that vLLM starts from, and the trainer's copy."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench.shapes import QWEN_05B, QWEN_3B
from steplog.demo import model as demo_model

SHAPES = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    "0.5B": QWEN_05B,
    "3B": QWEN_3B,
}
SPREAD = 0.01
"""Standard deviation of the random weights: large enough that two versions answer differently."""


def write_folder(shape: str, folder: Path, dtype: str) -> Path:
    """Configuration and tokenizer; vLLM is started without weights, since the trainer sends them."""
    folder.mkdir(parents=True, exist_ok=True)
    demo_model.prepare(folder)
    config = _config(shape).to_dict() | {"architectures": ["Qwen2ForCausalLM"], "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


def make_model(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    with torch.device(device):
        return Qwen2ForCausalLM(_config(shape)).to(dtype).eval()


def draw_weights(model: Any, version: int) -> None:
    """Random weights that depend on the version alone."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(version)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name), SPREAD, generator=generator)


def logprobs(model: Any, ids: Any, temperature: float) -> Any:
    """The log-prob of each id given those before it; 0 for the first."""
    tensor = torch.as_tensor(ids, dtype=torch.int64, device=model.device)[None]
    with torch.no_grad():
        logits = model(input_ids=tensor).logits[0, :-1].float() / temperature
    chosen = logits.log_softmax(-1).gather(-1, tensor[0, 1:, None])[:, 0]
    return torch.cat([chosen.new_zeros(1), chosen]).cpu().numpy()


def _config(shape: str) -> Any:
    return Qwen2Config(
        **SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=4096, eos_token_id=257
    )
