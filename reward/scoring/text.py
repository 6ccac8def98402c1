"""Token ids to text, for reward functions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servicekit.errors import Fatal
from steplog.rewards import RewardFailed


class TextDecoder:
    """Loads the tokenizer when the first text is decoded."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._tokenizer: Any = None

    def decode(self, ids: Sequence[int]) -> str:
        if self._folder is None:
            raise RewardFailed("text needs a tokenizer: start the worker with --tokenizer FOLDER")
        if self._tokenizer is None:
            self._tokenizer = _load(Path(self._folder))
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def check_tokenizer(folder: str | None) -> None:
    if folder is not None and not (Path(folder) / "tokenizer.json").is_file():
        raise Fatal(f"{folder} has no tokenizer.json; --tokenizer takes a tokenizer's folder")


def _load(folder: Path) -> Any:
    """Decoding needs `tokenizers` only; importing transformers would take seconds."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))
