"""Packed rows against transformers' own forward pass on padded rows."""

from typing import Any

import pytest
import torch

from pool.core.rows import Row
from tests.trainer.model import small
from trainer.model.loading import prepare
from trainer.model.mode_search import find_execution_mode
from trainer.model.pack import make_pack
from trainer.model.packed import ExecutionMode, PackedModel

CPU = torch.device("cpu")
ROWS = [small.row(length, seed, 0.7) for seed, length in enumerate([9, 23, 14, 5, 31])]


def packed(causal: Any) -> PackedModel:
    model = PackedModel(prepare(causal))
    model.mode = find_execution_mode(model, torch.float32, CPU)
    return model


def padded_logprobs(causal: Any, rows: list[Row]) -> torch.Tensor:
    """As the usual trainer does it."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.from_numpy(row.ids)
        mask[place, : len(row)] = 1
    logits = causal(input_ids=ids, attention_mask=mask, use_cache=False).logits
    found = []
    for place, row in enumerate(rows):
        warm = torch.from_numpy(row.temperatures[1:])[:, None]
        spread = (logits[place, : len(row) - 1] / warm).log_softmax(-1)
        told = spread.gather(1, ids[place, 1 : len(row), None])[:, 0]
        found.append(told[torch.from_numpy(row.trainable[1:])])
    return torch.cat(found)


def gradient(causal: Any, logprobs: torch.Tensor) -> torch.Tensor:
    causal.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return torch.cat([weight.grad.flatten() for weight in causal.parameters()])


def models() -> dict[str, Any]:
    return {
        "Qwen2": {},
        "Llama": {},
        "Mistral": {"sliding_window": 6},
        "Qwen3": {"head_dim": 16},
        "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    }


@pytest.mark.parametrize("kind", models())
def test_packed_rows_have_the_log_probs_and_gradient_of_padded_rows(kind: str) -> None:
    plain = small.model(kind, **models()[kind])
    expected = padded_logprobs(plain, ROWS)
    wanted = gradient(plain, expected)
    model = packed(small.model(kind, **models()[kind]))
    assert model.mode == ExecutionMode("rows", "chunked", None if kind == "Mistral" else "rows")
    told, _ = model(make_pack(ROWS, CPU))
    torch.testing.assert_close(told, expected, rtol=1e-5, atol=1e-5)
    assert (gradient(model.causal, told) - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize(
    "mode",
    [
        ExecutionMode("rows", "full"),
        ExecutionMode("single", "chunked"),
        ExecutionMode("single", "full"),
    ],
)
def test_every_mode_gives_the_same(mode: ExecutionMode) -> None:
    model = packed(small.model())
    best, entropy = model(make_pack(ROWS, CPU))
    told, other = model(make_pack(ROWS, CPU), mode)
    torch.testing.assert_close(told, best, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(other, entropy, rtol=1e-5, atol=1e-5)


def test_filling_changes_nothing() -> None:
    model = packed(small.model())
    torch.testing.assert_close(
        model(make_pack(ROWS, CPU, (7, 1)))[0], model(make_pack(ROWS, CPU))[0], rtol=0, atol=1e-6
    )


def test_a_model_that_carries_state_over_rows_is_run_row_by_row() -> None:
    model = packed(small.mamba())
    assert model.mode == ExecutionMode("single", "chunked")
    expected = torch.cat([padded_logprobs(model.causal, [row]) for row in ROWS])
    torch.testing.assert_close(model(make_pack(ROWS, CPU))[0], expected, rtol=1e-5, atol=1e-5)


def test_a_model_with_caps_on_attention_and_logits_computes_them_itself() -> None:
    model = packed(small.model("Gemma2", head_dim=8))
    assert model.mode == ExecutionMode("single", "full")


def test_a_model_that_scales_its_logits_computes_them_itself() -> None:
    model = packed(small.model("Granite", logits_scaling=8.0))
    assert model.mode == ExecutionMode("rows", "full")
    expected = padded_logprobs(small.model("Granite", logits_scaling=8.0), ROWS)
    told, _ = model(make_pack(ROWS, CPU))
    torch.testing.assert_close(told, expected, rtol=1e-5, atol=1e-5)


def test_the_blocks_that_repeat_are_found() -> None:
    assert len(packed(small.model()).layers) == 2
    assert len(packed(small.mamba()).layers) == 2
