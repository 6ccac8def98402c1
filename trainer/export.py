"""`steplog export`: writes a checkpoint as a Hugging Face folder."""

from pathlib import Path
from typing import Any

import torch

from servicekit.errors import Fatal
from trainer.checkpoints.folder import Checkpoints
from trainer.learner_state import STEPS, weight_key
from trainer.model.exported_folder import write_folder
from trainer.model.initial_weights import InitialWeights
from trainer.model.loading import TrainedWeights, add_lora, build
from trainer.model.packed import PackedModel
from trainer.model.settings import LearnerSettings
from trainer.model.sharding import Ranks, place_model
from trainer.settings import ExportSettings


def export(settings: ExportSettings) -> str:
    """Writes the folder and returns a sentence that says so. It works on the CPU, next to a running
    trainer, and needs memory for the weights only."""
    checkpoints = Checkpoints(settings.checkpoints, settings.run, keep=1)
    version = checkpoints.newest() if settings.version is None else settings.version
    if version is None or version not in checkpoints.versions():
        available = ", ".join(map(str, checkpoints.versions())) or "none"
        which = "no checkpoint" if version is None else f"no checkpoint of version {version}"
        raise Fatal(f"{which} in {checkpoints.folder}; available versions: {available}")
    if settings.into.exists() and any(settings.into.iterdir()):
        raise Fatal(f"{settings.into} is not empty; choose another folder with --into")
    model_folder = Path(checkpoints.description(version)["model"])
    weights, causal = _load(checkpoints, version, getattr(torch, settings.dtype))
    write_folder(weights, causal, model_folder, settings.into, writes=True)
    return f"exported version {version} of run {settings.run} to {settings.into}"


def _load(checkpoints: Checkpoints, version: int, dtype: torch.dtype) -> tuple[TrainedWeights, Any]:
    """The weights of a checkpoint, and the model that they belong to."""
    description = checkpoints.description(version)
    folder = Path(description["model"])
    learner = LearnerSettings.from_record(description["learner"])
    causal = build(folder)
    if learner.lora_rank:
        add_lora(causal, learner.lora_rank, learner.lora_alpha, learner.lora_targets)
    trained = place_model(
        PackedModel(causal),
        torch.float32,
        torch.device("cpu"),
        Ranks(),
        shard=False,
        read_weights=lambda: InitialWeights(folder, causal).read(),
    )
    steps = torch.tensor(0)
    own = {weight_key(name): weight.detach() for name, weight in trained.parameters.items()}
    checkpoints.open(version).read_into({STEPS: steps, **own})
    return TrainedWeights(causal, trained, dtype, lambda: int(steps)), causal
