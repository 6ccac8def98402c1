"""An offline trainer that is killed wherever it can be, against one that is not."""

from pathlib import Path
from typing import Any

import pytest

from pool import topics
from pool.connection import Connection
from pool.core.ledger import Ledger
from pool.topics import LEDGER
from tests.pool.log import records
from tests.trainer.offline.history import offline, write_history
from tests.trainer.offline.test_decider import told
from tests.trainer.saved import whole_tensors
from tests.trainer.trainer_process import TrainerProcess

pytestmark = [pytest.mark.broker, pytest.mark.slow]

GAPS = [
    ("produced", 1),
    ("decided", 2),
    ("before training", 2),
    ("opened", 3),
    ("checkpoint renamed", 1),
    ("live", 2),
]
"""Each life comes a little further; the first dies inside the transaction that begins the run."""


def weights(folder: Path, run: str) -> dict[str, Any]:
    *_, newest = sorted((folder / "checkpoints" / run).glob("0*"))
    return whole_tensors(newest)


@pytest.mark.timeout(900)
def test_kills_at_every_gap_leave_the_weights_of_an_undisturbed_run(
    connection: Connection, tiny_model: Path, tmp_path: Path
) -> None:
    topics.create(connection, partitions=3)
    write_history(connection, 30)
    fields: dict[str, Any] = {"checkpoint_every": 3, "optimiser_steps": 2}
    killed = offline(connection, tiny_model, tmp_path, run="killed", **fields)
    for gap in GAPS:
        assert TrainerProcess(killed, gap).wait() == -9, f"it did not come to {gap}"
    assert TrainerProcess(killed).wait() == 0
    undisturbed = offline(connection, tiny_model, tmp_path, run="undisturbed", **fields)
    assert TrainerProcess(undisturbed).wait() == 0

    assert told(connection, "killed") == told(connection, "undisturbed")
    Ledger("killed", records(connection, LEDGER))  # raises if a group was trained twice
    ours, theirs = weights(tmp_path, "killed"), weights(tmp_path, "undisturbed")
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not ours[name].equal(theirs[name])]
