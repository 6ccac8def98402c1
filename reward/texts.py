"""Ids to text, for reward functions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reward.verdict import RewardFailed
from servicekit.errors import Fatal


class Texts:
    """The tokenizer is loaded when the first text is looked at."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._backend: Any = None

    def decode(self, ids: Sequence[int]) -> str:
        if self._folder is None:
            raise RewardFailed("text needs a tokenizer: start the worker with --tokenizer FOLDER")
        if self._backend is None:
            self._backend = _load(Path(self._folder))
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text


def check_tokenizer(folder: str | None) -> None:
    if folder is not None and not (Path(folder) / "tokenizer.json").is_file():
        raise Fatal(f"{folder} holds no tokenizer.json")


def _load(folder: Path) -> Any:
    """Decoding needs nothing of transformers, which takes seconds to load."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))
