"""One run of the whole system, every part a process of its own: gateway, reward worker, trainer."""

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pool import topics
from pool.connection import Connection
from pool.core.versions import Version
from tests import processes
from tests.gateway.running import running_gateway
from tests.reward.running import running_worker
from tests.steplog.command import STEPLOG, reaching
from tests.trainer.learning import task
from tests.trainer.learning.agents import Agents, working_agents
from tests.trainer.learning.evidence import Evidence
from tests.vllm_engine import Engine
from trainer.weights.engine import EngineControl

RUN = "letters"
VERSIONS = 32
GROUPS_PER_BATCH = 4
GROUP_SIZE = 8
MAX_AGE = 4
LOOK_EVERY = 0.1
LIMIT_S = 600.0
"""For one run on a busy machine; an idle one needs a tenth."""


class Trainer(NamedTuple):
    process: "subprocess.Popen[bytes]"
    log: Path

    def has_ended(self) -> bool:
        """Looks for a moment."""
        try:
            self.process.wait(LOOK_EVERY)
        except subprocess.TimeoutExpired:
            return False
        return True


class Training(NamedTuple):
    """What came of a run."""

    labels: list[str]
    """Of the engine's weights, while the trainer lived."""
    evidence: Evidence


def train(
    connection: Connection,
    engine: Engine,
    model: Path,
    folder: Path,
    *,
    seed: int,
    learning_rate: float,
    staleness: int,
) -> Training:
    """From version 0, whatever the engine did before, to the last. `staleness` is what admission aims
    at (eta)."""
    topics.create(connection, partitions=2)
    engine.label("default")
    scoring = f"{task.__file__}:{task.small_letters.__name__}"
    groups = (staleness + 1) * GROUPS_PER_BATCH
    admission = ("--group-size", str(GROUP_SIZE), "--max-groups", str(groups))
    options = ("--seed", str(seed), "--learning-rate", str(learning_rate), "--model", str(model))
    with (
        # The trainer first: the others get ready while it imports torch.
        running_trainer(connection, engine, folder, *options) as trainer,
        running_worker(connection, "--function", scoring, "--tokenizer", str(model)),
        running_gateway(connection, [engine.url], model, "--run", RUN, *admission) as gateway,
    ):
        labels = watch(engine, trainer, until=Version(1, 0))
        with working_agents(gateway.url, f"seed{seed}", GROUP_SIZE) as agents:
            labels += watch(engine, trainer, agents=agents)
        exit_code = trainer.process.wait()
        assert exit_code == 0, (
            f"the trainer ended with {exit_code}\n{trainer.log.read_text()[-3000:]}"
        )
    return Training(labels, Evidence(connection, RUN))


def watch(
    engine: Engine, trainer: Trainer, *, until: Version | None = None, agents: Agents | None = None
) -> list[str]:
    """The engine's labels until it has this one, or the trainer has ended."""
    deadline, labels = time.monotonic() + LIMIT_S, [_label(engine)]
    while labels[-1] != str(until) and not trainer.has_ended():
        labels.append(_label(engine))
        if agents is not None and agents.failure is not None:
            raise agents.failure
        if time.monotonic() > deadline:
            told = trainer.log.read_text()[-3000:]
            raise AssertionError(f"after {LIMIT_S:g} s the engine has {labels[-1]}\n{told}")
    return labels


def _label(engine: Engine) -> str:
    return EngineControl(engine.url).label(LIMIT_S, "look")


@contextmanager
def running_trainer(
    connection: Connection,
    engine: Engine,
    folder: Path,
    *options: str,
    versions: int = VERSIONS,
    groups_per_batch: int = GROUPS_PER_BATCH,
) -> Iterator[Trainer]:
    fixed = {
        "run": RUN,
        "engines": engine.url,
        "versions": versions,
        "groups-per-batch": groups_per_batch,
        "group-size": GROUP_SIZE,
        "max-age": MAX_AGE,
        "checkpoints": folder / "checkpoints",
        "tracker-dir": folder / "progress",
        "threads": 1,
        "port": 0,
    }
    command = [STEPLOG, "train", *reaching(connection), *options]
    command += [word for name, value in fixed.items() for word in (f"--{name}", str(value))]
    with tempfile.NamedTemporaryFile(prefix="train-", suffix=".log", delete=False) as output:
        process = processes.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    trainer = Trainer(process, Path(output.name))
    try:
        yield trainer
        trainer.log.unlink()
    finally:
        process.kill()
        process.wait()
