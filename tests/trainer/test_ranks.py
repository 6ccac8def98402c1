"""Two processes that train together, as torchrun starts them."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pool import topics
from pool.connection import Connection
from pool.topics import LEDGER
from schemas import Outcome
from tests.conftest import free_port
from tests.pool.log import committed
from tests.trainer.agents import RUN, submit_groups
from tests.trainer.saved import whole_tensors
from tests.trainer.trainer_process import TrainerProcess, settings_of

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]

VERSIONS = 4


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=2)
    return connection


def torchrun(settings: dict[str, Any]) -> "subprocess.Popen[bytes]":
    """Two ranks; settings come by the environment, since torchrun takes some flags for its own."""
    given = {f"STEPLOG_TRAIN_{name.upper()}": str(value) for name, value in settings.items()}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "--no-python"]
    steplog = Path(sys.executable).parent / "steplog"
    return subprocess.Popen([*command, str(steplog), "train"], env=os.environ | given)


def weights(folder: Path) -> dict[str, Any]:
    return whole_tensors(folder / "checkpoints" / RUN / f"{VERSIONS:08}", "weight.")


def outcomes(log: Connection) -> list[Outcome]:
    return [record for record in committed(log, LEDGER) if isinstance(record, Outcome)]


def test_two_ranks_make_the_weights_that_one_process_makes(
    log: Connection, tiny_model: Path, tmp_path: Path
) -> None:
    submit_groups(log, [f"p{n}" for n in range(3 * VERSIONS)])
    fields: dict[str, Any] = {"groups_per_batch": 3, "versions": VERSIONS}
    together = settings_of(log, tiny_model, tmp_path / "two", **fields)
    assert torchrun(together).wait(240) == 0
    measured = outcomes(log)
    assert [outcome.version for outcome in measured] == list(range(1, VERSIONS + 1))
    assert {outcome.metrics["trajectories"] for outcome in measured} == {12}, "of both ranks"

    alone = settings_of(log, tiny_model, tmp_path / "one", **fields)
    assert TrainerProcess(alone).wait() == 0
    ours, theirs = weights(tmp_path / "two"), weights(tmp_path / "one")
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert weight.allclose(theirs[name], rtol=1e-3, atol=1e-5), name


def test_when_one_rank_dies_all_stop_and_any_number_goes_on(
    log: Connection, tiny_model: Path, tmp_path: Path
) -> None:
    submit_groups(log, [f"p{n}" for n in range(2 * VERSIONS)])
    fields: dict[str, Any] = {"checkpoint_every": 1, "max_age": 100}
    settings = settings_of(log, tiny_model, tmp_path, **fields)
    ranks = torchrun(settings | {"versions": 1000})
    deadline = time.monotonic() + 200
    while len(outcomes(log)) < 2:
        assert ranks.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    children = subprocess.run(
        ["pgrep", "-P", str(ranks.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(children[-1]), 9)
    assert ranks.wait(120) != 0
    assert TrainerProcess(settings | {"versions": VERSIONS}).wait() == 0
    versions = [outcome.version for outcome in outcomes(log)]
    assert versions == list(range(1, VERSIONS + 1))
