"""Checkpoints as tests write and read them."""

from pathlib import Path
from typing import Any

from trainer.checkpoints.folder import Checkpoints
from trainer.checkpoints.saved_state import SavedState
from trainer.checkpoints.writer import CheckpointWriter
from trainer.learner import Learner
from trainer.learner_state import state_tensors
from trainer.model.sharding import Ranks


def save(
    checkpoints: Checkpoints,
    version: int,
    state: dict[str, Any] | Learner,
    description: dict[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint and waits for it."""
    tensors = state_tensors(state) if isinstance(state, Learner) else state
    writer = CheckpointWriter(checkpoints, Ranks(), incarnation=1)
    writer.start(version, tensors, description or {})
    writer.wait()
    return checkpoints.path(version)


def whole_tensors(folder: Path, prefix: str = "") -> dict[str, Any]:
    """The tensors of a checkpoint whose names begin like this."""
    saved = SavedState(folder)
    return {name: saved.read(name) for name in saved.shapes if name.startswith(prefix)}
