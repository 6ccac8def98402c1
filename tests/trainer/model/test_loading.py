from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer.model import small
from trainer.algorithm.settings import LossSettings
from trainer.learner import Learner
from trainer.model import loading
from trainer.model.pack import make_pack
from trainer.model.settings import LearnerSettings

CPU = torch.device("cpu")


def learner(causal: Any, **settings: Any) -> Learner:
    return Learner(
        causal, LearnerSettings(learning_rate=1e-2, **settings), LossSettings(), device=CPU
    )


def loaded(folder: Path, **settings: Any) -> Learner:
    return Learner.from_folder(
        folder, LearnerSettings(learning_rate=1e-2, **settings), LossSettings()
    )


def test_a_folder_is_loaded_in_float32(tiny_model: Path) -> None:
    causal = loaded(tiny_model).model.causal
    assert {weight.dtype for weight in causal.parameters()} == {torch.float32}
    assert causal.training


def test_there_is_no_dropout() -> None:
    causal = small.model()
    causal.extra = torch.nn.Dropout(0.5)
    assert loading.prepare(causal).extra.p == 0


def test_weights_leave_under_the_names_of_the_checkpoint(tiny_model: Path) -> None:
    made = loaded(tiny_model)
    source = made.weights(torch.bfloat16)
    sent = dict(source)
    assert [(p.name, p.dtype, p.shape) for p in source.metadata()] == [
        (name, weight.dtype, tuple(weight.shape)) for name, weight in sent.items()
    ]
    saved = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert set(sent) == set(saved) - {"lm_head.weight"}
    assert all(torch.equal(weight, saved[name].bfloat16()) for name, weight in sent.items())


def test_weights_are_cast_before_ranks_exchange_them(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged: list[Any] = []

    def gather(weight: Any) -> Any:
        exchanged.append(weight.dtype)
        return weight.detach()

    made = learner(small.model())
    monkeypatch.setattr(loading, "gather", gather)
    sent = dict(made.weights(torch.bfloat16))
    assert set(exchanged) == {torch.bfloat16}
    for name, weight in sent.items():
        assert torch.equal(weight, made.trained.parameters[f"causal.{name}"].bfloat16())


def test_experts_leave_one_by_one() -> None:
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    names = [name for name, _ in learner(small.model("Qwen3Moe", **fields)).weights()]
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names


def test_masters_are_sent_not_their_bf16_copies() -> None:
    made = learner(small.model(), dtype="bfloat16")
    made.step(small.batch())
    sent = dict(made.weights(torch.float32))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(sent[name], made.trained.parameters[f"causal.{name}"].detach())
    copy = made.model.causal.model.layers[0].mlp.up_proj.weight
    assert copy.dtype == torch.bfloat16
    assert torch.equal(copy.detach(), sent[name].bfloat16())
    assert not torch.equal(copy.detach().float(), sent[name])


def test_an_exported_folder_is_a_model_with_its_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    made = loaded(tiny_model)
    made.step(small.batch())
    made.export(tiny_model, tmp_path / "out", torch.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = dict(made.weights(torch.float32))
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in expected.items())
    text = "<|im_start|>user\nHello<|im_end|>"
    tokenizers = [
        AutoTokenizer.from_pretrained(folder) for folder in (tiny_model, tmp_path / "out")
    ]
    assert tokenizers[0].encode(text) == tokenizers[1].encode(text)
    assert tokenizers[1].chat_template == tokenizers[0].chat_template


def with_lora(**fields: Any) -> Learner:
    pytest.importorskip("peft", reason="LoRA needs peft")
    causal = small.model(**fields)
    loading.add_lora(causal, 4, 8.0, "all-linear")
    return learner(causal)


def test_lora_trains_its_adapters_only() -> None:
    made = with_lora()
    before = {name: w.detach().clone() for name, w in made.model.named_parameters()}
    made.step(small.batch())
    made.step(small.batch())
    changed = {
        n for n, w in made.model.named_parameters() if not torch.equal(w.detach(), before[n])
    }
    assert changed == set(made.trained.parameters)
    assert changed and all(".lora_" in name for name in changed)


def test_merged_weights_equal_the_model_with_its_adapters() -> None:
    made = with_lora()
    for _ in range(3):
        made.step(small.batch())
    plain = small.model()
    sent = dict(made.weights(torch.float32))
    assert set(sent) == {name for name, _ in plain.named_parameters()}
    plain.load_state_dict(sent, strict=False)
    merged = learner(plain)
    pack = make_pack([row for sample in small.batch().samples for row in sample.rows], CPU)
    torch.testing.assert_close(merged.model(pack)[0], made.model(pack)[0], rtol=1e-5, atol=1e-5)


def test_the_reference_of_lora_is_the_model_without_adapters() -> None:
    made = with_lora()
    pack = make_pack([small.row(20, 1)], CPU)
    before = made.model(pack)[0].detach()
    made.step(small.batch())
    with made.model.without_adapters():
        torch.testing.assert_close(made.model(pack)[0], before)
    assert not torch.allclose(made.model(pack)[0], before)


def test_without_peft_lora_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(loading.MissingPackage, match="LoRA needs peft"):
        loading.add_lora(small.model(), 4, 8.0, "all-linear")
