"""The computed memory, against torch where that needs no GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench.training.memory import ALL_OFFLOADED, OFFLOADED, RECOMPUTED, SHAPES, table
from trainer.model.memory import GIB, ModelShape, estimate_memory
from trainer.model.settings import ExecutionSettings

TOKENS = 256
CONFIG = Qwen2Config(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=688,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
KEPT = ExecutionSettings()


def kept_bytes(causal: Any, layer: Any) -> int:
    """What a layer keeps for its backward pass, without weights and the rotations that all share."""
    base = causal.model
    hidden = torch.randn(1, TOKENS, CONFIG.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    rotations = base.rotary_emb(hidden, torch.arange(TOKENS)[None])
    others = {t.untyped_storage().data_ptr() for t in (*causal.parameters(), *rotations)}
    kept: dict[int, int] = {}

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in others:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        layer(hidden, position_embeddings=rotations)
    return sum(kept.values())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_layer_keeps_as_much_as_computed(compiled: bool) -> None:
    causal = Qwen2ForCausalLM(CONFIG).bfloat16()
    layer = causal.model.layers[0]
    if compiled:  # what is kept is decided before code is generated, which would take long
        layer = torch.compile(layer, backend="aot_eager_decomp_partition")
    expected = TOKENS * ModelShape.of(CONFIG).layer_activations(compiled=compiled)
    assert kept_bytes(causal, layer) == pytest.approx(expected, rel=0.03)


def test_the_shape_has_the_weights_of_the_model() -> None:
    count = sum(weight.numel() for weight in Qwen2ForCausalLM(CONFIG).parameters())
    assert ModelShape.of(CONFIG).weights == pytest.approx(count, rel=0.02)


def test_each_setting_saves_what_it_should() -> None:
    shape = SHAPES["7B"]
    kept, recomputed, offloaded, optimiser = (
        estimate_memory(shape, execution)
        for execution in (KEPT, RECOMPUTED, OFFLOADED, ALL_OFFLOADED)
    )
    assert recomputed.per_token < kept.per_token / 5
    assert recomputed.per_token - offloaded.per_token == 2 * shape.hidden * (shape.layers - 2)
    assert offloaded.fixed - optimiser.fixed == 8 * shape.weights - GIB
    assert estimate_memory(shape, KEPT, ranks=8).fixed < kept.fixed / 4
    assert estimate_memory(shape, KEPT, lora_rank=32).fixed < kept.fixed / 5
    assert kept.longest_pack(80 * 10**9) == 0, "18 bytes per weight"


def test_the_page_has_the_computed_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    assert table() in page, "run python -m bench.training.memory"
