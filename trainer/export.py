"""A checkpoint as a Hugging Face folder, for engines, evaluations and people."""

import json

import torch

from servicekit.errors import Fatal
from trainer.algorithm.settings import LossSettings
from trainer.checkpoint import ABOUT, Checkpoints
from trainer.learner import Learner
from trainer.model.settings import LearnerSettings
from trainer.settings import ExportSettings


def export(settings: ExportSettings) -> str:
    """Writes the folder; says what it did."""
    checkpoints = Checkpoints(settings.checkpoints, settings.run, keep=1)
    version = checkpoints.newest() if settings.version is None else settings.version
    if version is None or version not in checkpoints.versions():
        there = ", ".join(map(str, checkpoints.versions())) or "none"
        raise Fatal(
            f"no checkpoint of version {version} in {checkpoints.folder}; there are: {there}"
        )
    if settings.into.exists() and any(settings.into.iterdir()):
        raise Fatal(f"{settings.into} is not empty; choose another --into")
    about = json.loads((checkpoints.place(version) / ABOUT).read_text())
    learner = Learner.from_folder(
        about["model"],
        LearnerSettings.model_validate(about["learner"]),
        LossSettings.model_validate(about["loss"]),
    )
    learner.load_state(checkpoints.load(version))
    learner.export(about["model"], settings.into, getattr(torch, settings.dtype))
    return f"version {version} of {settings.run} is in {settings.into}"
