"""Weights are read from Hugging Face folders as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from servicekit.errors import Fatal
from tests.trainer.model import small
from trainer.algorithm.settings import LossSettings
from trainer.learner import Learner
from trainer.model.settings import LearnerSettings

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def load(folder: Path, **settings: Any) -> Learner:
    return Learner.from_folder(folder, LearnerSettings(**settings), LossSettings())


def assert_as_transformers(folder: Path) -> Any:
    """Parameters and buffers, and therefore logits, are those of `from_pretrained`."""
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    causal = load(folder).model.causal
    for ours, theirs in (
        (causal.named_parameters(), expected.named_parameters()),
        (causal.named_buffers(), expected.named_buffers()),
    ):
        found, wanted = dict(ours), dict(theirs)
        assert found.keys() == wanted.keys()
        assert not [name for name in wanted if not found[name].equal(wanted[name])]
    return causal


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Qwen2", {}),  # tied
        ("Llama", {}),
        ("Gemma2", {"head_dim": 8}),  # a scale as a buffer
        ("Qwen3Moe", EXPERTS),  # experts are joined
        ("Mixtral", {"num_local_experts": 4}),  # experts are renamed and joined
        ("DeepseekV3", LATENT),  # with a buffer in its files
    ],
)
def test_a_folder_becomes_the_model_that_transformers_makes(
    tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    small.model(kind, **fields).save_pretrained(tmp_path)
    assert_as_transformers(tmp_path)


def test_files_of_any_number_and_data_type(tmp_path: Path) -> None:
    small.model("Llama").to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_as_transformers(tmp_path)


def test_a_file_of_torch(tmp_path: Path) -> None:
    model = small.model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert_as_transformers(tmp_path)


def test_other_prefixes_are_found_and_kept(tmp_path: Path) -> None:
    """The weights of the base model alone, without its head, which is tied."""
    small.model().model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_as_transformers(tmp_path)


def test_what_is_exported_is_the_folder_that_came(tmp_path: Path) -> None:
    """With its experts one by one and its buffers."""
    small.model("DeepseekV3", **LATENT).save_pretrained(tmp_path / "in")
    load(tmp_path / "in").export(tmp_path / "in", tmp_path / "out", torch.float32)
    came, left = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert came.keys() == left.keys()
    assert not [name for name in came if not came[name].equal(left[name])]


def test_a_large_model_is_exported_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.model.exported_folder.FILE_BYTES", 20_000)
    small.model("Llama").save_pretrained(tmp_path / "in")
    load(tmp_path / "in").export(tmp_path / "in", tmp_path / "out", torch.float32)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    expected, found = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("in", "out")
    )
    assert not [name for name in expected if not expected[name].equal(found[name])]


def test_adapters_begin_as_peft_makes_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    small.model().save_pretrained(tmp_path)
    torch.manual_seed(3)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    config = peft.LoraConfig(r=4, target_modules="all-linear")
    peft.inject_adapter_in_model(config, expected)
    torch.manual_seed(3)
    found = dict(load(tmp_path, lora_rank=4).model.causal.named_parameters())
    wanted = dict(expected.named_parameters())
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if not found[name].equal(wanted[name])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "model.layers.1.mlp.up_proj.weight"}, r"lacks weights .*: model\.layers\.1\.mlp"),
        ({"drop": None}, "has no weights: neither model.safetensors nor"),
        ({"config": {"hidden_size": 64}}, r"in the shape \(96, 32\), and its config.json asks for"),
        ({"config": {"quantization_config": {"quant_method": "fp8"}}}, "is quantized"),
    ],
)
def test_a_folder_that_does_not_fit_is_one_sentence(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    small.model("Llama").save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    tensors.pop(change.get("drop") or "", None)
    save_file(tensors, file)
    if "drop" in change and change["drop"] is None:
        file.unlink()
    config.write_text(json.dumps(json.loads(config.read_text()) | change.get("config", {})))
    with pytest.raises(Fatal, match=message):
        load(tmp_path)


def test_a_state_space_model_is_loaded_too(tmp_path: Path) -> None:
    """Its parameters are not all made by torch's own layers."""
    small.mamba().save_pretrained(tmp_path)
    causal = assert_as_transformers(tmp_path)
    assert isinstance(causal, transformers.MambaForCausalLM)
