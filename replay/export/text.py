"""Token ids to text, with the tokenizer that the Steps were made with and no other."""

from pathlib import Path
from typing import Any

from schemas import Step
from schemas.packing import unpack_ids
from servicekit.errors import Fatal
from servicekit.tokenizer import fingerprint, load_backend


class StepTextDecoder:
    """Decodes with one tokenizer. Steps that do not name theirs are assumed to use this one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._backend = _load(folder)
        self._fingerprint = fingerprint(self._backend)

    def decode(self, packed: bytes, step: Step) -> str:
        if step.tokenizer not in ("", self._fingerprint):
            raise Fatal(
                f"Step {step.step_id} was made with tokenizer {step.tokenizer}, but {self._folder} "
                f"has {self._fingerprint}; give the folder of the right one, or omit --tokenizer."
            )
        ids = [number for number in unpack_ids(packed) if number >= 0]  # negative ids are no tokens
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def _load(folder: Path) -> Any:
    if not folder.is_dir():
        raise Fatal(f"--tokenizer needs a folder, and {folder} is none.")
    try:
        return load_backend(str(folder))
    # Broken files make the loader raise arbitrary exceptions.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise Fatal(f"No tokenizer can be loaded from {folder}: {reason}") from error
