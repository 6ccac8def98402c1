"""Whether ids in the log mean what they mean to the model."""

import logging
from pathlib import Path

from pool.errors import Fatal
from pool.tokenizer import fingerprint
from pool.trajectories import Trajectory, step_of

log = logging.getLogger(__name__)


class Tokenizer:
    """That of a model's folder. `fingerprint` is None where the folder has none to compare with."""

    def __init__(self, folder: Path, fingerprint: str | None) -> None:
        self._folder = folder
        self._fingerprint = fingerprint

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        from transformers import AutoTokenizer

        try:
            found = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError):
            found = None
        if found is None or not found.is_fast:
            log.warning("%s has no tokenizer.json, so nobody can tell whether ids fit", folder)
            return cls(folder, None)
        return cls(folder, fingerprint(found.backend_tokenizer))

    def check(self, trajectory: Trajectory) -> None:
        """Refuses ids of another tokenizer; Steps that do not say theirs pass."""
        for received in trajectory.steps:
            made_with = step_of(received).tokenizer
            if self._fingerprint and made_with and made_with != self._fingerprint:
                raise Fatal(
                    f"trajectory {trajectory.uid} was made with tokenizer {made_with}, and "
                    f"{self._folder} has {self._fingerprint}; its ids mean something else there"
                )
