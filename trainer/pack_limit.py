"""A pack size that ranks which ran out of memory leave for the next start.

Several ranks cannot repeat a failed pass (`out_of_memory.py`), so they end, and whatever restarts them
would end the same way. The size is in a file beside the run's checkpoints, which all nodes share. It
holds while the setting `tokens_per_pack` is the one that failed; setting another one, or deleting the
file, takes it back. Losing the file costs no more than one further failed pass.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.model.settings import ExecutionSettings
from trainer.model.sharding import Ranks
from trainer.out_of_memory import NextStartNeeded

log = logging.getLogger(__name__)

FILE = "pack-limit.json"


class PackLimit:
    """The file of one run. `configured` has the settings as they were given."""

    def __init__(self, folder: Path, configured: ExecutionSettings) -> None:
        self.path = folder / FILE
        self._configured = configured

    @contextmanager
    def keep_for_next_start(self) -> Iterator[None]:
        """Writes the file when the process ends because it needs smaller packs."""
        try:
            yield
        except NextStartNeeded as needed:
            self._write(needed.tokens_per_pack)
            raise

    def _write(self, tokens_per_pack: int) -> None:
        content = {"setting": self._configured.tokens_per_pack, "tokens_per_pack": tokens_per_pack}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(content))
        unfinished.rename(self.path)

    def apply(self, ranks: Ranks) -> ExecutionSettings:
        """The settings to start with. All ranks take what rank 0 has read."""
        tokens_per_pack = torch.tensor(self._read() if ranks.rank == 0 else 0)
        if ranks.world > 1:
            dist.broadcast(tokens_per_pack, src=0)
        return self._configured.model_copy(update={"tokens_per_pack": int(tokens_per_pack)})

    def _read(self) -> int:
        setting = self._configured.tokens_per_pack
        if not self.path.is_file():
            return setting
        content = json.loads(self.path.read_text())
        if content["setting"] != setting:
            return setting
        smaller = int(content["tokens_per_pack"])
        log.warning(
            "packs of %d tokens did not fit into memory in an earlier start; continuing with at most "
            "%d (set --tokens-per-pack, or delete %s, to change it)",
            setting, smaller, self.path,
        )  # fmt: skip
        return smaller
