"""A version of a live run, made again: the same batch, the same loss, the same weights."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import pytest
import torch
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from safetensors.torch import load_file

from pool import topics
from pool.connection import Connection
from pool.readers.end_offsets import wait_until_readable
from pool.topics import LEDGER, REWARDED
from schemas import Outcome
from servicekit.errors import Fatal, OffsetLost
from steplog import cli
from steplog.kafka import local_kafka
from tests.pool.log import messages, records, write
from tests.trainer.agents import RUN, submit_groups
from tests.trainer.saved import whole_tensors
from tests.trainer.trainer_process import settings_of
from trainer.reproduction.command import replay_step
from trainer.reproduction.comparison import MetricComparison
from trainer.reproduction.recorded_run import RecordedRun
from trainer.reproduction.settings import ReplayStepSettings
from trainer.service import serve
from trainer.settings import TrainSettings

VERSIONS = 5


class Lived(NamedTuple):
    log: Connection
    model: Path
    checkpoints: Path


@pytest.fixture(scope="module")
def lived(
    kafka: local_kafka.Broker, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Lived:
    """A run of some versions, two of its checkpoints older than the newest."""
    log = Connection(bootstrap=kafka.bootstrap, topic_prefix=f"test-travel-{uuid4().hex[:8]}.")
    folder = tmp_path_factory.mktemp("lived")
    topics.create(log, partitions=2)
    submit_groups(log, [f"p{n}" for n in range(2 * VERSIONS)])
    given = settings_of(log, tiny_model, folder, versions=VERSIONS, checkpoint_every=2)
    given |= {"optimiser_steps": 2, "warmup": 3, "seed": 7}
    serve(TrainSettings.model_validate(given))
    wait_until_readable(log, LEDGER)
    return Lived(log, tiny_model, folder / "checkpoints")


def settings(lived: Lived, version: int, **fields: Any) -> ReplayStepSettings:
    given = lived.log.model_dump(exclude_none=True) | {"run": RUN, "version": version}
    return ReplayStepSettings.model_validate(given | fields)


def told(lived: Lived, version: int, **fields: Any) -> dict[str, Any]:
    said: list[str] = []
    status = replay_step(settings(lived, version, json_=True, **fields), said.append)
    (line,) = said
    found: dict[str, Any] = json.loads(line)
    return found | {"same": status == 0}


@contextmanager
def untouched(lived: Lived) -> Iterator[None]:
    """Neither the log nor the checkpoints change."""

    def state() -> Any:
        log = [(m.partition, m.offset) for m in messages(lived.log, LEDGER)]
        return log, sorted(lived.checkpoints.rglob("*"))

    before = state()
    yield
    assert state() == before


@pytest.mark.broker
@pytest.mark.slow
def test_a_version_comes_out_bit_for_bit_from_an_older_checkpoint(
    lived: Lived, tmp_path: Path
) -> None:
    torch.set_num_threads(2)  # the run had one, and its Outcomes say so
    torch.manual_seed(1)
    with untouched(lived):
        found = told(lived, 4, checkpoints=lived.checkpoints, into=tmp_path / "again")
    again = found["again"]
    assert found["same"] and found["same_batch"]
    assert again["from_version"] == 2
    assert again["tolerance"] == 0
    assert again["machine"]["threads"] == 1
    assert {"loss", "grad_norm", "reward_mean", "entropy"} <= again["metrics"].keys()
    assert all(one["recorded"] == one["reproduced"] for one in again["metrics"].values())
    assert again["other_weights"] == 0
    written = load_file(tmp_path / "again" / "model.safetensors")
    saved = whole_tensors(lived.checkpoints / RUN / f"{4:08}")
    name = "model.embed_tokens.weight"
    assert written[name].equal(saved[f"weight.causal.{name}"])


@pytest.mark.broker
@pytest.mark.slow
def test_the_first_version_comes_from_the_model_alone(lived: Lived) -> None:
    found = told(lived, 1, model=lived.model)
    assert found["same"]
    assert found["again"]["from_version"] == 0


@pytest.mark.broker
@pytest.mark.slow
def test_the_batch_is_shown_as_it_was_trained(
    lived: Lived, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(lived, 3)
    assert found["batch"] == found["recorded_batch"]
    assert found["settings"]["loss"]["optimiser_steps"] == 2
    members = [member for group in found["groups"] for member in group["members"]]
    assert len(found["groups"]) == 2 and len(members) == 8
    assert sorted(m["reward"] for m in members) == [0.0] * 4 + [1.0] * 4
    assert sum(m["advantage"] for m in members) == pytest.approx(0)
    assert {m["age"] for m in members} == {2}, "version 0 sampled it, version 2 is trained"
    words = ["replay", "step", "--run", RUN, "--version", "3"]
    reach = ["--bootstrap", lived.log.bootstrap, "--topic-prefix", lived.log.topic_prefix]
    assert cli.main([*words, *reach]) == 0
    shown = capsys.readouterr().out
    assert f"batch {found['batch']}: bit for bit the batch that was trained" in shown
    assert all(member["trajectory_uid"] in shown for member in members)


@pytest.mark.broker
@pytest.mark.slow
def test_a_changed_setting_or_record_is_another_batch(lived: Lived) -> None:
    past = RecordedRun(lived.log, RUN)
    (decision,) = past.decisions_for(3)
    assert past.rebuild_batch(decision).is_same
    given = json.loads(decision.settings)
    given["loss"]["advantage"] = "loo"
    other = msgspec.structs.replace(decision, settings=json.dumps(given))
    assert past.rebuild_batch(other).is_same is False
    fewer = msgspec.structs.replace(decision, groups=decision.groups[:1])
    assert past.rebuild_batch(fewer).is_same is False
    swapped = msgspec.structs.replace(decision, groups=decision.groups[::-1])
    assert past.rebuild_batch(swapped).is_same is False


@pytest.mark.broker
@pytest.mark.slow
def test_an_outcome_that_is_not_true_is_status_1(
    lived: Lived, capsys: pytest.CaptureFixture[str]
) -> None:
    (outcome,) = [
        r for r in records(lived.log, LEDGER) if isinstance(r, Outcome) and r.version == 2
    ]
    metrics = outcome.metrics | {"loss": outcome.metrics["loss"] + 1e-12}
    write(lived.log, LEDGER, [msgspec.structs.replace(outcome, metrics=metrics)])
    found = told(lived, 2, model=lived.model)
    assert found["same_batch"] and not found["same"]
    write(lived.log, LEDGER, [msgspec.structs.replace(outcome, batch="00")])
    words = ["replay", "step", "--run", RUN, "--version", "2"]
    reach = ["--bootstrap", lived.log.bootstrap, "--topic-prefix", lived.log.topic_prefix]
    assert cli.main([*words, *reach]) == 1
    assert "NOT the batch that was trained, which is 00" in capsys.readouterr().out
    write(lived.log, LEDGER, [outcome])


@pytest.mark.broker
@pytest.mark.slow
def test_what_cannot_be_made_again_is_one_sentence(lived: Lived, tmp_path: Path) -> None:
    (real,) = RecordedRun(lived.log, RUN).decisions_for(1)
    fresh = msgspec.structs.replace(real, run="fresh", sequence=1)
    given = json.loads(real.settings)
    given["learner"]["lora_rank"] = 8
    wide = msgspec.structs.replace(fresh, sequence=2, version=2, settings=json.dumps(given))
    wide = msgspec.structs.replace(wide, groups=[])
    write(lived.log, LEDGER, [fresh, wide])
    given["loss"] = {"invented": 1}
    newer = msgspec.structs.replace(wide, sequence=3, version=3, settings=json.dumps(given))
    done = Outcome(run="fresh", incarnation=1, sequence=2, version=2)
    write(lived.log, LEDGER, [newer, done])
    for sentence, version, fields in (
        (r"no Decision that made version 9 of run run; .* is 5", 9, {}),
        (r"no Decision of run nobody; runs in the ledger: fresh, run", 1, {"run": "nobody"}),
        (r"no checkpoint below version 1; set --model", 1, {"checkpoints": lived.checkpoints}),
        (r"not a Hugging Face folder", 1, {"model": tmp_path}),
        (r"is not empty; choose another", 1, {"model": lived.model, "into": lived.checkpoints}),
        (r"has no Outcome in the ledger", 1, {"run": "fresh", "model": lived.model}),
        (r"lora_rank was changed between .* 0 and 2", 2, {"run": "fresh", "model": lived.model}),
        (r"settings that this release of steplog does not accept", 3, {"run": "fresh"}),
    ):
        with pytest.raises(Fatal, match=sentence):
            told(lived, version, **fields)
    assert told(lived, 1, run="fresh")["same_batch"] is None


@pytest.mark.broker
@pytest.mark.slow
def test_records_that_have_expired_are_named(lived: Lived) -> None:
    """The last test here: it deletes the oldest records."""
    (decision,) = RecordedRun(lived.log, RUN).decisions_for(1)
    group = decision.groups[0]
    first = min(offset for member in group.members for offset in member.offsets)
    place = TopicPartition(lived.log.topic_name(REWARDED), group.partition, first + 1)
    admin = AdminClient(lived.log.confluent())
    (deleted,) = admin.delete_records([place]).values()
    deleted.result(60)
    sentence = rf"version 1 of run run cannot be reproduced.* {group.prompt_uid} in partition"
    with pytest.raises(OffsetLost, match=sentence):
        told(lived, 1)
    with pytest.raises(OffsetLost, match=sentence):
        told(lived, 2, model=lived.model)
    assert told(lived, 4, checkpoints=lived.checkpoints)["same"], "a checkpoint needs no more of it"


def test_metrics_are_compared_bit_for_bit_or_by_size() -> None:
    close = MetricComparison("loss", 0.5, 0.5 + 1e-12)
    assert not close.is_within(0)
    assert close.is_within(1e-3)
    assert not MetricComparison("loss", 0.5, 0.51).is_within(1e-3)
    assert MetricComparison("loss", 0.0, 1e-6).is_within(1e-3), "losses lie around 0"
    assert MetricComparison("ratio_max", math.nan, math.nan).is_within(0)
    assert not MetricComparison("ratio_max", math.nan, 1.0).is_within(1e-3)
    assert not MetricComparison("ratio_max", 1.0, math.nan).is_within(1e-3)
    assert not MetricComparison("loss", 0.5, None).is_within(1e-3)
