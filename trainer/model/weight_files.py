"""The files with the weights of a Hugging Face folder. Tensors are read when they are sliced."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from servicekit.errors import Fatal

FILES = ("model.safetensors", "pytorch_model.bin")
"""Names of a file with all weights, the preferred one first; `.index.json` lists several files."""

Stored = Any
"""A tensor in a file: slicing it reads that part."""


@contextmanager
def open_weights(folder: Path) -> Iterator[Mapping[str, Stored]]:
    """The tensors of the folder by name."""
    with ExitStack() as files:
        stored: dict[str, Stored] = {}
        for file in _find_files(folder):
            if file.suffix == ".bin":
                stored |= torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            else:
                opened = files.enter_context(safe_open(file, framework="pt"))
                stored |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        yield stored


def stored_shape(stored: Stored) -> tuple[int, ...]:
    return tuple(stored.get_shape() if hasattr(stored, "get_shape") else stored.shape)


def _find_files(folder: Path) -> list[Path]:
    for name in FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            names = json.loads(index.read_text())["weight_map"].values()
            return [folder / name for name in sorted(set(names))]
    raise Fatal(f"model {folder} has no weights: neither {FILES[0]} nor {FILES[0]}.index.json")
