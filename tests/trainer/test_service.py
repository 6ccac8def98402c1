"""The whole trainer without engines, in this process."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from pool import topics
from pool.connection import Connection
from pool.core.trajectories import annotate
from pool.producers.producer import Producer
from pool.topics import LEDGER, POLICY, REWARDED
from schemas import Decision, Outcome, PolicyVersion, Position, Record, TrajectoryEnd
from servicekit import tracing
from servicekit.errors import Fatal
from tests.pool.log import committed, key_of, write
from tests.telemetry.collector import Collector, running_collector
from tests.trainer.agents import RUN, group, submit_groups
from tests.trainer.data.test_scored import posted
from tests.trainer.decisions.live_run import PATIENCE, decisions
from tests.trainer.trainer_process import settings_of
from trainer.service import serve
from trainer.settings import TrainSettings

pytestmark = pytest.mark.broker


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=2)
    return connection


def test_versions_are_made_opened_and_live_in_order(
    log: Connection, tiny_model: Path, tmp_path: Path
) -> None:
    submit_groups(log, [f"p{n}" for n in range(6)])
    given = settings_of(log, tiny_model, tmp_path, versions=2, trackers=("tensorboard",))
    serve(TrainSettings.model_validate(given))
    given["versions"] = 3
    serve(TrainSettings.model_validate(given))

    policy = [r for r in committed(log, POLICY) if isinstance(r, PolicyVersion)]
    told = [(r.incarnation, r.version, r.phase) for r in policy]
    one = [(1, 0, "started")] + [(1, v, p) for v in (0, 1, 2) for p in ("opened", "live")]
    two = [(2, 2, "started")] + [(2, v, p) for v in (2, 3) for p in ("opened", "live")]
    assert told == one + two

    ledger = committed(log, LEDGER)
    decided = [r for r in ledger if isinstance(r, Decision) and r.version is not None]
    outcomes = [r for r in ledger if isinstance(r, Outcome)]
    assert [d.version for d in decided] == [o.version for o in outcomes] == [1, 2, 3]
    assert [d.sequence for d in decided] == [o.sequence for o in outcomes]
    assert json.loads(decided[0].settings)["loss"]["loss"] == "dppo_tv"
    assert outcomes[0].metrics["reward_mean"] == pytest.approx(0.5)
    phases = {"waiting", "reading", "training", "opening", "syncing"}
    assert phases <= outcomes[1].timings.keys()
    saved = tmp_path / "checkpoints" / RUN / "00000003" / "about.json"
    assert json.loads(saved.read_text())["version"] == 3


def test_the_next_batch_is_decided_and_prepared_while_the_present_one_trains(
    log: Connection, tiny_model: Path, tmp_path: Path
) -> None:
    """But no more than one, and none after the last version."""
    submit_groups(log, [f"p{n}" for n in range(8)])
    prepared = [Event() for _ in range(3)]
    stages: list[str] = []
    decided_while_training: list[list[int | None]] = []

    def probe(stage: str) -> None:
        stages.append(stage)
        if stage == "prepared":
            prepared[stages.count("prepared") - 1].set()
        if stage == "before training":
            version = stages.count("before training")
            if version < 3:
                assert prepared[version].wait(PATIENCE), f"version {version + 1} is not prepared"
            decided_while_training.append([d.version for d in decisions(log)])

    settings = settings_of(log, tiny_model, tmp_path, versions=3)
    serve(TrainSettings.model_validate(settings), probe)
    assert decided_while_training == [[1, 2], [1, 2, 3], [1, 2, 3]]


def test_posted_groups_are_trained_beside_those_of_agents(
    log: Connection, tiny_model: Path, tmp_path: Path
) -> None:
    """And again after the checkpoint is gone, from the same record."""
    submit_groups(log, ["p0"])
    scored = posted(prompt_uid="scored", group_uid="scored")
    write(log, REWARDED, [scored])
    given = settings_of(log, tiny_model, tmp_path, versions=1)
    serve(TrainSettings.model_validate(given))
    shutil.rmtree(tmp_path / "checkpoints")
    serve(TrainSettings.model_validate(given))
    ledger = committed(log, LEDGER)
    (decided,) = [r for r in ledger if isinstance(r, Decision) and r.version is not None]
    assert {group.prompt_uid: group.verdict for group in decided.groups} == {
        "p0": "train",
        "scored": "train",
    }
    (outcome,) = [r for r in ledger if isinstance(r, Outcome)]
    assert outcome.metrics["trajectories"] == 6


def test_a_folder_without_a_model_is_one_sentence(log: Connection, tmp_path: Path) -> None:
    given = settings_of(log, tmp_path, tmp_path)
    with pytest.raises(Fatal, match=r"is not a Hugging Face folder: it has no config\.json"):
        serve(TrainSettings.model_validate(given))


class Dies(Exception):
    pass


def die_after_training(stage: str) -> None:
    if stage == "trained":
        raise Dies


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with running_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector
        tracing.stop()


def test_what_is_trained_again_says_so_in_the_traces_of_its_trajectories(
    log: Connection, collector: Collector, tiny_model: Path, tmp_path: Path
) -> None:
    """The first life ends between training a version and opening it."""
    traces = asyncio.run(submit_traced(log, [*group("p"), *group("q")]))
    given = settings_of(log, tiny_model, tmp_path, versions=1, traces=True)
    with pytest.raises(Dies):
        serve(TrainSettings.model_validate(given), die_after_training)
    tracing.stop()
    serve(TrainSettings.model_validate(given))
    tracing.stop()

    again = [s.span_id for s in collector.named("version", version=1, again=True, incarnation=2)]
    parts = [span.name for span in collector.spans if span.parent_id in again]
    assert parts == ["train", "open", "sync", "live"]
    trained = collector.named("trained", version=1, incarnation=2)
    assert sorted(span.trace_id for span in trained) == sorted(traces)
    decided = collector.named("decide", version=1)
    assert [span.about["steplog.incarnation"] for span in decided] == [1]


async def submit_traced(connection: Connection, records: list[Record]) -> list[str]:
    """To `rewarded`, each record with a trace of its own; gives those of the Ends."""
    traces: list[str] = []
    async with Producer(connection, connection.codec()) as producer:
        for number, record in enumerate(records, 1):
            headers = tracing.headers(f"00-{number:032x}-{number:016x}-01")
            copy = annotate(record, Position(partition=0, offset=number))
            await producer.send(REWARDED, key_of(record), copy, headers)
            traces += [f"{number:032x}"] if isinstance(record, TrajectoryEnd) else []
    return traces
