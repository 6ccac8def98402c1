"""Which tokenizer made the ids of a Step: a fingerprint, so that nobody reads them with another."""

import hashlib
import os
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

from servicekit.errors import Fatal


def hide_torch() -> None:
    """Tokenizers need no torch, but transformers would load it: 8 seconds and 600 MB. To be called
    at the start of a process that has no other use for it."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def fingerprint(backend: Any) -> str:
    """What a Step says of the tokenizer, given its backend."""
    return hashlib.blake2b(backend.to_str().encode(), digest_size=8).hexdigest()


class TokenizerFolder:
    """A tokenizer that somebody wants to read recorded ids with."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def matches(self, recorded: str) -> bool:
        """Whether it is the one that a Step names; ids that came without a name are taken on trust."""
        return recorded in ("", self._as_it_is) or recorded == self._as_gateways_load_it

    def check(self, recorded: str) -> None:
        if not self.matches(recorded):
            raise Fatal(f"the tokenizer in {self._folder} {self.difference(recorded)}")

    def difference(self, recorded: str) -> str:
        return f"is {self._as_gateways_load_it}, and the Steps were recorded with {recorded}"

    @cached_property
    def _as_it_is(self) -> str:
        from tokenizers import Tokenizer

        file = Path(self._folder) / "tokenizer.json"
        try:
            return fingerprint(Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises nothing more exact
            raise Fatal(f"{file} holds no tokenizer: {error}") from error

    @cached_property
    def _as_gateways_load_it(self) -> str:
        """transformers changes some tokenizers by the model beside them. In a process of its own,
        because ours may have a use for torch."""
        script = "import sys; from servicekit.tokenizer import tell; tell(sys.argv[1])"
        command = [sys.executable, "-P", "-c", script, self._folder]
        told = subprocess.run(command, capture_output=True, text=True)
        if told.returncode:
            reason = (told.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise Fatal(f"no tokenizer could be loaded from {self._folder}: {reason}")
        return told.stdout.strip()


def tell(folder: str) -> None:
    sys.stdout.write(fingerprint(load_backend(folder)))


def load_backend(folder: str) -> Any:
    """As gateways load it, in a process without torch."""
    hide_torch()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
