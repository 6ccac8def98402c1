"""The checkpoints of a run: versions of the weights with everything needed to continue from them.

A checkpoint is a folder. It is written under a temporary name and renamed when it is complete and on
disk, so a folder with a checkpoint's name is always complete. Tensors are safetensors and the rest is
JSON, so that loading a checkpoint executes no code.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoints.saved_state import SavedState

DESCRIPTION = "about.json"
DIGITS = 8
UNFINISHED = ".unfinished-"
MODEL, EXPORTED = "model", "steplog.json"


class Checkpoints:
    """The checkpoints of one run, in one folder. Keeps the newest `keep`, and all whose version is a
    multiple of `keep_every`."""

    def __init__(
        self,
        folder: Path,
        run: str,
        keep: int,
        keep_every: int | None = None,
        probe: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self.folder = folder / run
        self._keep = keep
        self._keep_every = keep_every
        self._probe = probe

    def versions(self) -> list[int]:
        """Versions that have a checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdecimal())

    def newest(self) -> int | None:
        return max(self.versions(), default=None)

    def path(self, version: int) -> Path:
        return self.folder / f"{version:0{DIGITS}}"

    def unfinished_path(self, version: int, incarnation: int) -> Path:
        """Where an incarnation writes a checkpoint before it is complete. One that was replaced, but
        has not noticed it yet, writes to another folder."""
        return self.folder / f"{UNFINISHED}{version}-{incarnation}"

    def open(self, version: int) -> SavedState:
        """The saved tensors, which are read from the files when they are asked for."""
        return SavedState(self.path(version))

    def description(self, version: int) -> dict[str, Any]:
        """What `complete` was given: run, model and settings."""
        description: dict[str, Any] = json.loads((self.path(version) / DESCRIPTION).read_text())
        return description

    def clear_unfinished(self, current: Path | None = None) -> None:
        """Removes what interrupted writes have left behind; not what is being written now."""
        for leftover in self.folder.glob(f"{UNFINISHED}*"):
            if leftover != current:
                shutil.rmtree(leftover, ignore_errors=True)

    def complete(self, version: int, unfinished: Path, description: Mapping[str, Any]) -> None:
        """Gives a checkpoint whose tensors are on disk its name, and removes those that need not be
        kept any more."""
        about = unfinished / DESCRIPTION
        about.write_text(json.dumps(description, indent=1))
        _sync(about)
        _sync(unfinished)
        self._probe("checkpoint written")
        path = self.path(version)
        if path.exists():  # the same version is the same state
            shutil.rmtree(unfinished)
        else:
            unfinished.rename(path)
            _sync(self.folder)
        self._probe("checkpoint renamed")
        self._remove_old()

    @property
    def model(self) -> Path:
        """The Hugging Face folder of the last version, written when the run ends or is stopped."""
        return self.folder / MODEL

    @property
    def unfinished_model(self) -> Path:
        return self.folder / f"{UNFINISHED}{MODEL}"

    def exported_version(self) -> int | None:
        """The version of the Hugging Face folder, if there is one."""
        try:
            return int(json.loads((self.model / EXPORTED).read_text())["version"])
        except FileNotFoundError:
            return None

    def complete_model(self, version: int, run: str) -> None:
        """Replaces the Hugging Face folder by the unfinished one, which holds this version."""
        (self.unfinished_model / EXPORTED).write_text(json.dumps({"run": run, "version": version}))
        if self.model.exists():
            obsolete = self.folder / f"{UNFINISHED}obsolete-{MODEL}"
            self.model.rename(obsolete)
            shutil.rmtree(obsolete)
        self.unfinished_model.rename(self.model)

    def _remove_old(self) -> None:
        for version in self.versions()[: -self._keep]:
            if not (self._keep_every and version % self._keep_every == 0):
                obsolete = self.folder / f"{UNFINISHED}{version}"
                self.path(version).rename(obsolete)  # half a checkpoint must not have its name
                shutil.rmtree(obsolete)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
