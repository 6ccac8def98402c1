"""How much of a small change of LoRA adapters reaches an engine, alone and merged."""

from typing import Any

import pytest
import torch

from tests.trainer.model import small
from trainer.algorithm.settings import LossSettings
from trainer.learner import Learner
from trainer.model import loading
from trainer.model.adapters import round_at_random
from trainer.model.settings import LearnerSettings

pytest.importorskip("peft", reason="LoRA needs peft")
SETTINGS = LearnerSettings(learning_rate=1e-5, lora_rank=4, lora_alpha=8.0)


def base() -> Any:
    """Its weights are bf16 numbers, as in most checkpoints, and enough for a mean."""
    causal = small.model(hidden_size=256, intermediate_size=512, initializer_range=0.02)
    for weight in causal.parameters():
        weight.data = weight.data.bfloat16().float()
    return causal


def base_weights() -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in base().named_parameters()}


@pytest.fixture(scope="module")
def trained() -> Learner:
    """After its first step."""
    causal = base()
    loading.add_lora(causal, SETTINGS.lora_rank, SETTINGS.lora_alpha, "all-linear")
    made = Learner(causal, SETTINGS, LossSettings(), device=torch.device("cpu"))
    made.step(small.batch())
    return made


@pytest.fixture(scope="module")
def change(trained: Learner) -> dict[str, torch.Tensor]:
    """What the step changed of each weight, in float32."""
    before = base_weights()
    after = trained.weights(torch.float32)
    return {name: weight - before[name] for name, weight in after}


def arriving_share(change: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> float:
    """The part of the change that the sent weights contain, as a projection on it."""
    before = base_weights()
    inner = sum(
        float(((sent[name].float() - before[name]) * wanted).sum())
        for name, wanted in change.items()
    )
    return inner / sum(float((wanted**2).sum()) for wanted in change.values())


def test_a_merged_change_arrives_in_full_on_average(
    trained: Learner, change: dict[str, torch.Tensor]
) -> None:
    before = base_weights()
    nearest = {name: (before[name] + wanted).bfloat16() for name, wanted in change.items()}
    assert arriving_share(change, nearest) < 0.2  # why they are not rounded like this
    assert arriving_share(change, dict(trained.weights(torch.bfloat16))) == pytest.approx(
        1, abs=0.05
    )


def test_the_same_weights_are_merged_into_the_same_bits(trained: Learner) -> None:
    first, again = dict(trained.weights(torch.bfloat16)), dict(trained.weights(torch.bfloat16))
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())


def test_weights_without_an_adapter_are_sent_as_they_are(
    trained: Learner, change: dict[str, torch.Tensor]
) -> None:
    sent, before = dict(trained.weights(torch.bfloat16)), base_weights()
    frozen = [name for name, wanted in change.items() if not wanted.any()]
    assert "model.norm.weight" in frozen and "model.embed_tokens.weight" in frozen
    assert all(torch.equal(sent[name].float(), before[name]) for name in frozen)


def test_adapters_alone_are_the_change_under_the_names_of_checkpoints(
    trained: Learner, change: dict[str, torch.Tensor]
) -> None:
    source = trained.adapters()
    assert source is not None and source.rank == 4
    sent = dict(source)
    assert [(p.name, p.dtype, p.shape) for p in source.metadata()] == [
        (name, matrix.dtype, tuple(matrix.shape)) for name, matrix in sent.items()
    ]
    adapted = {name.rpartition(".lora_")[0] for name in sent}
    assert {f"{module}.weight" for module in adapted} == {n for n, w in change.items() if w.any()}
    for module in adapted:
        down, up = (sent[f"{module}.lora_{matrix}.weight"].bfloat16().float() for matrix in "AB")
        wanted = change[f"{module}.weight"]
        assert (up @ down - wanted).norm() < 0.01 * wanted.norm()


def test_a_model_that_is_trained_as_a_whole_has_no_adapters() -> None:
    made = Learner(small.model(), LearnerSettings(), LossSettings(), device=torch.device("cpu"))
    assert made.adapters() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_at_random_has_no_bias(dtype: torch.dtype) -> None:
    exact = torch.linspace(-2, 2, 1001).repeat(2000, 1)
    mean = round_at_random(exact, dtype, "seed").double().mean(0)
    assert (mean - exact[0].double()).abs().max() < 4 * torch.finfo(dtype).eps / 2000**0.5
    held = exact.to(dtype)
    assert torch.equal(round_at_random(held.float(), dtype, "seed"), held)
