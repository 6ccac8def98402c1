"""Ids to text, with the tokenizer that the Steps name and with no other."""

from pathlib import Path
from typing import Any

from schemas import Step
from schemas.packing import unpack_ids
from servicekit.errors import Fatal
from servicekit.tokenizer import fingerprint, load_backend


class Texts:
    """One tokenizer. Steps that do not say theirs are taken to be of this one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._backend = _load(folder)
        self._fingerprint = fingerprint(self._backend)

    def decode(self, packed: bytes, step: Step) -> str:
        if step.tokenizer not in ("", self._fingerprint):
            raise Fatal(
                f"step {step.step_id} was made with tokenizer {step.tokenizer}, and "
                f"{self._folder} holds {self._fingerprint}; give the folder of that one, or leave "
                "out --tokenizer"
            )
        ids = [number for number in unpack_ids(packed) if number >= 0]  # the others are nobody's
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def _load(folder: Path) -> Any:
    if not folder.is_dir():
        raise Fatal(f"{folder} is no folder, and --tokenizer needs one")
    try:
        return load_backend(str(folder))
    # Broken files make the loader fail in arbitrary ways; all of them mean the same.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise Fatal(f"no tokenizer could be loaded from {folder}: {reason}") from error
