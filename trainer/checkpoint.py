"""Checkpoints: a version of the weights with everything that is needed to continue training from it.

A checkpoint is a folder. It is written under a temporary name and renamed when it is complete and on
disk, so a folder with a checkpoint's name is always complete. Tensors are stored as safetensors and the
rest as JSON, so that loading a checkpoint executes no code.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from servicekit.errors import Fatal

TENSORS, DESCRIPTION = "state.safetensors", "about.json"
DIGITS = 8
UNFINISHED = ".unfinished-"


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

    def load(self, version: int) -> dict[str, Any]:
        """The saved tensors."""
        path = self.path(version)
        try:
            tensors: dict[str, Any] = load_file(path / TENSORS)
            return tensors
        except (OSError, SafetensorError) as error:
            raise Fatal(
                f"checkpoint {path} cannot be read: {error}; "
                "move it away to continue from the one before"
            ) from error

    def description(self, version: int) -> dict[str, Any]:
        """What `save` was given besides tensors: run, model and settings."""
        description: dict[str, Any] = json.loads((self.path(version) / DESCRIPTION).read_text())
        return description

    def save(
        self, version: int, tensors: Mapping[str, Any], description: Mapping[str, Any]
    ) -> Path:
        """Writes a checkpoint, and removes those that need not be kept any more."""
        path = self.path(version)
        if path.exists():
            return path  # the same version is the same state
        unfinished = self.folder / f"{UNFINISHED}{version}"
        try:
            self._clear_unfinished()
            unfinished.mkdir(parents=True)
            save_file(dict(tensors), unfinished / TENSORS)
            (unfinished / DESCRIPTION).write_text(json.dumps(description, indent=1))
            for file in unfinished.iterdir():
                _sync(file)
            _sync(unfinished)
            self._probe("checkpoint written")
            unfinished.rename(path)
            _sync(self.folder)
        except OSError as error:
            raise Fatal(f"checkpoint {path} cannot be written: {error.strerror}") from error
        self._probe("checkpoint renamed")
        self._remove_old()
        return path

    def _clear_unfinished(self) -> None:
        for leftover in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(leftover)

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
