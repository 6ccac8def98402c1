"""Checkpoints: a version of the weights, and all that is needed to go on from it as if nothing had
happened.

A checkpoint is a folder that has its name only when it is complete and on the disk: it is written
beside its place and moved there. Tensors are in safetensors and the rest in JSON, so loading one runs
nobody's code.
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

TENSORS, ABOUT = "state.safetensors", "about.json"
DIGITS = 8
UNFINISHED = ".unfinished-"


class Checkpoints:
    """Those of one run, in one folder. `keep` newest stay, and every one whose version is a multiple of
    `keep_every`."""

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
        """Oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdecimal())

    def newest(self) -> int | None:
        return max(self.versions(), default=None)

    def place(self, version: int) -> Path:
        return self.folder / f"{version:0{DIGITS}}"

    def load(self, version: int) -> dict[str, Any]:
        """The tensors that were saved."""
        place = self.place(version)
        try:
            tensors: dict[str, Any] = load_file(place / TENSORS)
            return tensors
        except (OSError, SafetensorError) as error:
            raise Fatal(
                f"checkpoint {place} cannot be read: {error}; move it away to go on from the one before"
            ) from error

    def save(self, version: int, tensors: Mapping[str, Any], about: Mapping[str, Any]) -> Path:
        """`about` is for people and tools: run, model, settings."""
        place = self.place(version)
        if place.exists():
            return place  # the same version is the same state
        unfinished = self.folder / f"{UNFINISHED}{version}"
        try:
            self._clear_unfinished()
            unfinished.mkdir(parents=True)
            save_file(dict(tensors), unfinished / TENSORS)
            (unfinished / ABOUT).write_text(json.dumps(about, indent=1))
            for file in unfinished.iterdir():
                _sync(file)
            _sync(unfinished)
            self._probe("checkpoint written")
            unfinished.rename(place)
            _sync(self.folder)
        except OSError as error:
            raise Fatal(f"checkpoint {place} cannot be written: {error.strerror}") from error
        self._probe("checkpoint renamed")
        self._remove_old()
        return place

    def _clear_unfinished(self) -> None:
        for leftover in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(leftover)

    def _remove_old(self) -> None:
        for version in self.versions()[: -self._keep]:
            if not (self._keep_every and version % self._keep_every == 0):
                place = self.place(version)
                doomed = self.folder / f"{UNFINISHED}{version}"
                place.rename(doomed)  # half a checkpoint must not have a checkpoint's name
                shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
