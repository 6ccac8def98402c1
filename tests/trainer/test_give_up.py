"""A batch that cannot be trained: the trainer stops, until it is told to continue without it.

Trainers are processes here, because they end with an error or are killed.
"""

from pathlib import Path
from typing import Any

import pytest

from pool import topics
from pool.connection import Connection
from pool.topics import LEDGER, POLICY
from replay.lineage.outcomes import find_outcomes
from schemas import Outcome, PolicyVersion
from tests.pool.log import committed
from tests.trainer.agents import RUN, submit_groups
from tests.trainer.decisions.live_run import decisions
from tests.trainer.test_kills import weights
from tests.trainer.trainer_process import TrainerProcess, settings_of
from trainer.reproduction.command import replay_step
from trainer.reproduction.settings import ReplayStepSettings

pytestmark = [pytest.mark.broker, pytest.mark.slow]


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=2)
    return connection


def opened(log: Connection) -> set[int]:
    policy = (r for r in committed(log, POLICY) if isinstance(r, PolicyVersion))
    return {r.version for r in policy if r.phase == "opened"}


def outcomes(log: Connection) -> list[Outcome]:
    return [record for record in committed(log, LEDGER) if isinstance(record, Outcome)]


@pytest.mark.timeout(600)
def test_a_batch_that_spoils_the_weights_is_given_up_for_good(
    log: Connection, tiny_model: Path, tmp_path: Path
) -> None:
    submit_groups(log, [f"p{n}" for n in range(4)])
    settings = settings_of(log, tiny_model, tmp_path / "run", check_engines=False)
    spoiling = settings | {"learning_rate": 1e38, "versions": 1}
    assert TrainerProcess(spoiling).wait() == 1
    assert opened(log) == {0}, "no engine and no checkpoint may have the spoilt version"
    assert not list((tmp_path / "run" / "checkpoints").rglob("0*"))

    calm = settings | {"versions": 2}
    assert TrainerProcess(calm).wait() == 1, "the Decision is trained as it was decided"
    assert TrainerProcess(calm | {"give_up": 3}).wait() == 1, "nothing was decided for version 3"
    assert TrainerProcess(calm | {"give_up": 1}, ("before training", 1)).wait() == -9
    assert TrainerProcess(calm).wait() == 0, "the ledger knows that the batch is given up"

    (first, *_) = made = decisions(log)
    given_up = [g for d in made for g in d.groups if g.verdict == "given_up"]
    assert [g.prompt_uid for g in given_up] == [g.prompt_uid for g in first.groups]
    uid = first.groups[0].members[0].trajectory_uid
    (fate,) = find_outcomes(RUN, made, uid, [])
    assert "not trained, given_up: an operator gave up its batch" in fate.sentence()
    assert [o.metrics["trajectories"] for o in outcomes(log)] == [0, 8]
    given = log.model_dump(exclude_none=True) | {"run": RUN, "version": 1}
    again = ReplayStepSettings.model_validate(given | {"model": tiny_model})
    assert replay_step(again, lambda line: None) == 0

    undisturbed = settings_of(log, tiny_model, tmp_path / "again", versions=2)
    assert TrainerProcess(undisturbed).wait() == 0
    ours, theirs = (weights(tmp_path / name, 2) for name in ("run", "again"))
    assert not different(ours, theirs)
    assert TrainerProcess(settings | {"versions": 3, "give_up": 2}).wait() == 1, "2 is live"


def different(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not ours[name].equal(theirs[name])]
