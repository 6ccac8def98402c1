"""Checkpoints as Hugging Face folders."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from servicekit.errors import Fatal
from tests.trainer.saved import save
from trainer.algorithm.settings import LossSettings
from trainer.checkpoints.folder import Checkpoints
from trainer.export import export
from trainer.learner import Learner
from trainer.model.settings import LearnerSettings
from trainer.settings import ExportSettings


@pytest.fixture
def checkpoints(tiny_model: Path, tmp_path: Path) -> Path:
    """One checkpoint, of version 3, whose weights are not the model's own."""
    loss, learning = LossSettings(), LearnerSettings()
    learner = Learner.from_folder(tiny_model, learning, loss)
    with torch.no_grad():
        for weight in learner.trained.parameters.values():
            weight.add_(0.25)
    about = {"model": str(tiny_model), "loss": loss.model_dump(), "learner": learning.model_dump()}
    save(Checkpoints(tmp_path / "checkpoints", "run", keep=1), 3, learner, about)
    return tmp_path / "checkpoints"


def test_the_folder_loads_with_the_trained_weights(
    checkpoints: Path, tiny_model: Path, tmp_path: Path
) -> None:
    into = tmp_path / "exported"
    told = export(ExportSettings(run="run", checkpoints=checkpoints, into=into, dtype="float32"))
    assert told == f"exported version 3 of run run to {into}"
    before = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    after = dict(AutoModelForCausalLM.from_pretrained(into).named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name].allclose(before[name] + 0.25) for name in before)
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (into, tiny_model))
    assert ours.encode("hello") == theirs.encode("hello")


def test_adapters_are_merged(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="LoRA needs peft")
    learning = LearnerSettings(lora_rank=4)
    learner = Learner.from_folder(tiny_model, learning, LossSettings())
    with torch.no_grad():
        for weight in learner.trained.parameters.values():
            weight.add_(0.25)
    about = {"model": str(tiny_model), "learner": learning.model_dump()}
    save(Checkpoints(tmp_path, "run", keep=1), 3, learner, about)
    into = tmp_path / "exported"
    export(ExportSettings(run="run", checkpoints=tmp_path, into=into, dtype="float32"))
    exported = AutoModelForCausalLM.from_pretrained(into).state_dict()
    expected = dict(learner.weights(torch.float32))
    assert not [name for name in expected if not exported[name].equal(expected[name])]


def test_what_cannot_be_exported_is_one_sentence(checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(Fatal, match=r"no checkpoint of version 7 .* available versions: 3"):
        export(ExportSettings(run="run", checkpoints=checkpoints, version=7, into=tmp_path / "x"))
    with pytest.raises(Fatal, match="is not empty; choose another folder with --into"):
        export(ExportSettings(run="run", checkpoints=checkpoints, into=checkpoints))
