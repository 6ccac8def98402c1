"""Fingerprints of tokenizers: a Step records the one that made its ids, so that no other reads them."""

import hashlib
import os
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

from servicekit.errors import Fatal


def hide_torch() -> None:
    """Keeps transformers from loading torch, which tokenizers do not need: 8 seconds and 600 MB. Call
    it at the start of a process that does not use torch otherwise."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def fingerprint(backend: Any) -> str:
    """The fingerprint that Steps record, of a tokenizer's backend."""
    return hashlib.blake2b(backend.to_str().encode(), digest_size=8).hexdigest()


class TokenizerFolder:
    """A tokenizer that is about to decode recorded ids."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def matches(self, recorded: str) -> bool:
        """Whether it made the ids with this fingerprint. Ids without a fingerprint are accepted."""
        return recorded in ("", self._file_fingerprint) or recorded == self._gateway_fingerprint

    def check(self, recorded: str) -> None:
        if not self.matches(recorded):
            raise Fatal(f"the tokenizer in {self._folder} {self.difference(recorded)}")

    def difference(self, recorded: str) -> str:
        """The predicate of a sentence about this tokenizer."""
        return f"is {self._gateway_fingerprint}, and the Steps were recorded with {recorded}"

    @cached_property
    def _file_fingerprint(self) -> str:
        """Of tokenizer.json as it is."""
        from tokenizers import Tokenizer

        file = Path(self._folder) / "tokenizer.json"
        try:
            return fingerprint(Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises nothing more specific
            raise Fatal(f"{file} contains no tokenizer: {error}") from error

    @cached_property
    def _gateway_fingerprint(self) -> str:
        """Of the tokenizer as gateways load it: transformers changes some according to the model's
        configuration. This runs in a process of its own, because ours may need torch."""
        script = (
            "import sys; from servicekit.tokenizer import write_fingerprint; "
            "write_fingerprint(sys.argv[1])"
        )
        command = [sys.executable, "-P", "-c", script, self._folder]
        completed = subprocess.run(command, capture_output=True, text=True)
        if completed.returncode:
            reason = (completed.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise Fatal(f"No tokenizer could be loaded from {self._folder}: {reason}")
        return completed.stdout.strip()


def write_fingerprint(folder: str) -> None:
    """Writes the fingerprint to stdout; run in a process of its own."""
    sys.stdout.write(fingerprint(load_backend(folder)))


def load_backend(folder: str) -> Any:
    """The tokenizer's backend as gateways load it, in a process without torch."""
    hide_torch()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
