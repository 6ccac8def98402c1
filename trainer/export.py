"""`steplog export`: writes a checkpoint as a Hugging Face folder."""

import torch

from servicekit.errors import Fatal
from trainer.algorithm.settings import LossSettings
from trainer.checkpoint import Checkpoints
from trainer.learner import Learner
from trainer.model.settings import LearnerSettings
from trainer.settings import ExportSettings


def export(settings: ExportSettings) -> str:
    """Writes the folder and returns a sentence that says so."""
    checkpoints = Checkpoints(settings.checkpoints, settings.run, keep=1)
    version = checkpoints.newest() if settings.version is None else settings.version
    if version is None or version not in checkpoints.versions():
        available = ", ".join(map(str, checkpoints.versions())) or "none"
        which = "no checkpoint" if version is None else f"no checkpoint of version {version}"
        raise Fatal(f"{which} in {checkpoints.folder}; available versions: {available}")
    if settings.into.exists() and any(settings.into.iterdir()):
        raise Fatal(f"{settings.into} is not empty; choose another folder with --into")
    description = checkpoints.description(version)
    learner = Learner.from_folder(
        description["model"],
        LearnerSettings.from_record(description["learner"]),
        LossSettings.model_validate(description["loss"]),
    )
    learner.load_state(checkpoints.load(version))
    learner.export(description["model"], settings.into, getattr(torch, settings.dtype))
    return f"exported version {version} of run {settings.run} to {settings.into}"
