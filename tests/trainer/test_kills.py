"""A trainer that is killed wherever it can be, against one that is not."""

from pathlib import Path
from typing import Any

import pytest

from pool import topics
from pool.connection import Connection
from pool.core.ledger import Ledger, group_id
from pool.topics import LEDGER, POLICY
from schemas import PolicyVersion
from tests.pool.log import committed, records
from tests.trainer.agents import RUN, submit_groups
from tests.trainer.decisions.live_run import decisions
from tests.trainer.saved import whole_tensors
from tests.trainer.trainer_process import DURING_WRITE, TrainerProcess, settings_of
from tests.trainer.weights.stub_engine import StubEngine, running_stubs

pytestmark = [pytest.mark.broker, pytest.mark.slow]

GAPS = [
    ("decided", 1),
    ("decided", 2),
    ("prepared", 2),
    ("before training", 1),
    ("trained", 2),
    ("opened", 2),
    ("sending", 30),
    ("synced", 2),
    ("live", 3),
    ("checkpoint written", 1),
    ("checkpoint renamed", 1),
    (DURING_WRITE, 1),
    ("produced", 4),
    ("offsets sent", 5),
]
"""Every place between two things that must hold together; the last two are inside transactions. The
second batch is decided and prepared while the first one is trained."""
VERSIONS = 26


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=3)
    return connection


def weights(folder: Path, version: int) -> dict[str, Any]:
    return whole_tensors(folder / "checkpoints" / RUN / f"{version:08}")


def check_engine(engine: StubEngine, trained: dict[str, Any]) -> None:
    """It serves the last version of the last life, whole."""
    assert engine.label() == f"{len(GAPS) + 1}.{VERSIONS}"
    assert not engine.paused()
    (held,) = engine.weights()
    sums = {
        name.removeprefix("weight.causal."): float(tensor.double().sum())
        for name, tensor in trained.items()
        if name.startswith("weight.")
    }
    assert held == pytest.approx(sums)


@pytest.mark.timeout(900)
def test_kills_at_every_gap_lose_nothing_and_train_nothing_twice(
    log: Connection, tiny_model: Path, tmp_path: Path
) -> None:
    submit_groups(log, [f"p{n}" for n in range(2 * VERSIONS)])
    # Old data are the only ones here, and age is not what this is about.
    fields = {"versions": VERSIONS, "checkpoint_every": 5, "max_age": 1000}
    killed = settings_of(log, tiny_model, tmp_path / "killed", check_engines=False, **fields)
    with running_stubs(1) as (engine,):
        killed["engines"] = (engine.url,)
        for gap in GAPS:
            assert TrainerProcess(killed, gap).wait() == -9, f"it did not come to {gap}"
        assert TrainerProcess(killed).wait() == 0
        check_engine(engine, weights(tmp_path / "killed", VERSIONS))

    made = decisions(log)
    trained = [group_id(g) for d in made for g in d.groups if g.verdict == "train"]
    assert len(trained) == len(set(trained)) == 2 * VERSIONS
    assert [d.version for d in made if d.version is not None] == list(range(1, VERSIONS + 1))
    Ledger(RUN, records(log, LEDGER))  # raises if a group was trained twice
    started = [
        r for r in committed(log, POLICY) if isinstance(r, PolicyVersion) and r.phase == "started"
    ]
    assert [record.incarnation for record in started] == list(range(1, len(GAPS) + 2))

    # Without checkpoints, another trainer trains the whole ledger again, undisturbed.
    undisturbed = settings_of(log, tiny_model, tmp_path / "undisturbed", **fields)
    assert TrainerProcess(undisturbed).wait() == 0
    ours, theirs = (
        weights(tmp_path / "killed", VERSIONS),
        weights(tmp_path / "undisturbed", VERSIONS),
    )
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not ours[name].equal(theirs[name])]
    assert not different
