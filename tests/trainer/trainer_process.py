"""Trainers as processes that die where a test wants them to.

Importing torch and transformers takes longer than most tests, so a server process does it once and
every trainer is forked from there: a process of its own, which SIGKILL ends like any other.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from pool.connection import Connection
from tests.trainer.agents import RUN

context: ForkServerContext = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["trainer.service", "transformers.models.qwen2.modeling_qwen2"])

WAIT_S = 120.0
DURING_WRITE = "trained while a checkpoint is written"


class TrainerProcess:
    """One trainer. `die` is a stage and how often it must be reached first."""

    def __init__(self, settings: dict[str, Any], die: tuple[str, int] | None = None) -> None:
        self.process: ForkServerProcess = context.Process(target=_run_trainer, args=(settings, die))
        self.process.start()

    def wait(self) -> int:
        """The exit code; -9 when it was killed."""
        self.process.join(WAIT_S)
        assert self.process.exitcode is not None, "the trainer neither ended nor died"
        return self.process.exitcode

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


def settings_of(connection: Connection, model: Path, folder: Path, **fields: Any) -> dict[str, Any]:
    return {
        **connection.model_dump(exclude_none=True),
        "run": RUN,
        "model": model,
        "checkpoints": folder / "checkpoints",
        "tracker_dir": folder / "progress",
        "port": 0,
        "threads": 1,
        "groups_per_batch": 2,
        "learning_rate": 1e-3,
        "weights_retry_s": 0.5,
        **fields,
    }


def _run_trainer(settings: dict[str, Any], die: tuple[str, int] | None) -> None:
    from servicekit.errors import SteplogError
    from trainer.model.loading import TrainedWeights
    from trainer.service import serve
    from trainer.settings import TrainSettings

    seen: dict[str, int] = {}

    def probe(stage: str) -> None:
        seen[stage] = seen.get(stage, 0) + 1
        if die == (DURING_WRITE, 1):
            if stage == "checkpoint written":
                threading.Event().wait()  # this thread writes; it never comes to renaming
            stage = DURING_WRITE if stage == "trained" and "checkpoint written" in seen else stage
            seen[stage] = 1
        if (stage, seen[stage]) == die:
            os.kill(os.getpid(), signal.SIGKILL)

    def probed(weights: TrainedWeights) -> Iterator[Any]:
        for item in read(weights):
            probe("sending")  # in the middle of a broadcast
            yield item

    read = TrainedWeights.__iter__
    setattr(TrainedWeights, "__iter__", probed)  # noqa: B010
    try:
        serve(TrainSettings.model_validate(settings), probe)
    except SteplogError as error:
        raise SystemExit(str(error)) from error
