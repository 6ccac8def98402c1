"""Writes checkpoints in the background: training goes on as soon as the state is copied.

Every rank has a writer and writes its own shards. Rank 0 gives the checkpoint its name when all of them
are on disk; only then does the version count as saved. A rank that dies in the middle leaves a folder
with a temporary name, which the next checkpoint clears away.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from servicekit.errors import Fatal
from trainer.checkpoints.folder import Checkpoints
from trainer.checkpoints.saved_state import write_shards
from trainer.checkpoints.staging import StagedState
from trainer.model.sharding import Ranks

log = logging.getLogger(__name__)

Tensor = Any

WRITE_LIMIT = timedelta(hours=2)
"""How long a rank waits for the files of another. One that dies ends the wait at once."""


class CheckpointWriter:
    """Writes one checkpoint at a time. All ranks have to call `start` together."""

    def __init__(self, checkpoints: Checkpoints, ranks: Ranks, incarnation: int) -> None:
        self._checkpoints = checkpoints
        self._ranks = ranks
        self._incarnation = incarnation
        self._staged = StagedState()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._running: Future[int] | None = None
        self._saved_version: int | None = None
        # A process group of its own: the thread's messages must not mix with those of training.
        self._group = (
            dist.new_group(backend="gloo", timeout=WRITE_LIMIT) if ranks.world > 1 else None
        )

    @property
    def is_writing(self) -> bool:
        return self._running is not None

    def start(
        self, version: int, tensors: Mapping[str, Tensor], description: Mapping[str, Any]
    ) -> None:
        """Copies the tensors and begins to write them, after an earlier write has finished."""
        self.wait()
        staged = self._staged.copy(tensors)
        self._running = self._thread.submit(self._write, version, staged, description)

    def poll(self) -> int | None:
        """The newest version that was completely written by this process, if any. Raises Fatal if a
        checkpoint could not be written."""
        if self._running is not None and self._running.done():
            self.wait()
        return self._saved_version

    def wait(self) -> None:
        """Waits for the running write, if there is one."""
        if self._running is not None:
            self._saved_version = self._running.result()
            self._running = None

    def _write(
        self, version: int, tensors: Mapping[str, Tensor], description: Mapping[str, Any]
    ) -> int:
        unfinished = self._checkpoints.unfinished_path(version, self._incarnation)
        try:
            if self._ranks.rank == 0:
                self._checkpoints.clear_unfinished(unfinished)
            write_shards(unfinished, tensors, self._group)
            if self._ranks.rank == 0:
                self._checkpoints.complete(version, unfinished, description)
                log.info("checkpoint of version %d is complete", version)
        except OSError as error:
            path = self._checkpoints.path(version)
            raise Fatal(
                f"checkpoint {path} cannot be written: {error.strerror or error}"
            ) from error
        return version
