"""The whole offline trainer, in this process."""

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from pydantic import ValidationError

from pool import topics
from pool.connection import Connection
from pool.core.ledger import Ledger
from pool.topics import LEDGER, POLICY
from schemas import Outcome, PolicyVersion
from servicekit.errors import Fatal
from tests.pool.log import committed, records
from tests.trainer.agents import submit_groups
from tests.trainer.offline.history import AGAIN, offline
from tests.trainer.trainer_process import settings_of
from trainer.service import serve
from trainer.settings import TrainSettings


@pytest.mark.broker
def test_a_range_is_trained_to_its_end_without_a_group_and_without_engines(
    connection: Connection, tiny_model: Path, tmp_path: Path
) -> None:
    topics.create(connection, partitions=2)
    submit_groups(connection, [f"p{n}" for n in range(5)])
    submit_groups(connection, ["flat"], rewards=[1.0] * 4)
    given = offline(connection, tiny_model, tmp_path)
    said = serve(TrainSettings.model_validate(given))
    assert said is not None and "run again has read its whole range" in said
    assert "5 train, 1 no_variance" in said and "20 train, 4 no_variance" in said
    assert f"steplog export --run again --checkpoints {tmp_path / 'checkpoints'}" in said
    assert (tmp_path / "checkpoints" / "again" / "model" / "config.json").is_file()

    policy = [r for r in committed(connection, POLICY) if isinstance(r, PolicyVersion)]
    phases = [("started", 0)] + [(p, v) for v in range(4) for p in ("opened", "live")]
    assert [(r.phase, r.version) for r in policy] == phases
    outcomes = [r for r in records(connection, LEDGER) if isinstance(r, Outcome)]
    assert [o.version for o in outcomes] == [1, 2, 3]
    assert all(o.metrics["mismatch_kl"] >= 0 for o in outcomes)
    groups = AdminClient(connection.confluent()).list_consumer_groups().result().valid
    assert not [g.group_id for g in groups if AGAIN in g.group_id or "scan" in g.group_id]

    said = serve(TrainSettings.model_validate(given))
    assert said is not None and "version       3" in said, "there was nothing left to do"
    assert Ledger(AGAIN, records(connection, LEDGER)).verdicts == {"train": 20, "no_variance": 4}

    live = settings_of(connection, tiny_model, tmp_path, run=AGAIN)
    with pytest.raises(Fatal, match=r"run again is an offline run; continue it with --offline"):
        serve(TrainSettings.model_validate(live))
    serve(TrainSettings.model_validate(live | {"run": "run", "versions": 1}))
    with pytest.raises(Fatal, match=r"run run was trained live; choose another name"):
        serve(TrainSettings.model_validate(given | {"run": "run"}))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"from_": 3}, r"--from selects a range of the log; it needs --offline"),
        (
            {"offline": True, "engines": ("http://e",)},
            r"--engines cannot be used with --offline",
        ),
        ({"offline": True, "max_age": 3}, r"age counts versions of this run only"),
        ({"offline": True, "group": "g"}, r"an offline run joins no consumer group"),
        ({"offline": True, "accept_runs": ("a",)}, r"--of-run selects the runs"),
    ],
)
def test_settings_that_do_not_go_together_are_one_sentence(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainSettings.model_validate({"model": "m", **given})
