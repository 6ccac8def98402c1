"""An export has all of a trajectory and where it lay, is complete or not there, and others load it."""

import os
import signal
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pool import topics
from pool.connection import Connection
from pool.producers.output import producer_options
from pool.topics import REWARDED, STEPS
from replay.export.command import export
from replay.settings import DatasetExportSettings
from schemas import Codec, Step
from schemas.codec import single_object_header
from servicekit.errors import Fatal, OffsetLost
from tests import processes
from tests.pool.log import messages, write
from tests.pool.records import end, feedback, run_of, step
from tests.pool.topic_content import conversation
from tests.replay.logs import exported, fill, posted, without_positions
from tests.tiny_model import build_tokenizer

pytestmark = pytest.mark.broker


@pytest.fixture
def log(connection: Connection) -> Connection:
    fill(connection)
    return connection


def by_uid(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["trajectory_uid"]: row for row in rows}


def test_a_row_has_full_prompts_the_latest_reward_and_its_provenance(
    log: Connection, tmp_path: Path
) -> None:
    rows = by_uid(exported(log, tmp_path / "out", topic="rewarded", format="jsonl"))
    assert rows.keys() == {"t", "r", "empty", "hole"}
    talk = rows["t"]
    assert [one["prompt_ids"] for one in talk["steps"]] == conversation(3)[1]
    assert talk["steps"][0]["logprobs"] == [-0.5, -0.5]
    assert talk["reward"] == 3.0  # the last that came, long after the End
    assert [given["reward"] for given in talk["feedback"]] == [2.0, 3.0, 0.75]
    assert [(r["name"], r["version"], r["value"]) for r in talk["rewards"]] == [
        ("exact", "2", 0.5),
        ("judge", "b", None),
    ]
    assert (rows["r"]["reward"], rows["r"]["channel"]) == (0.25, "val")
    first, second = rows["r"]["steps"]
    assert (first["orphan"], first["delivered"]) == (True, False)
    assert (second["orphan"], second["delivered"], second["tenant"]) == (False, True, "acme")
    assert rows["hole"]["problem"] == "its End counts 2 Steps, and 1 are in the log"
    assert rows["empty"]["reason"] == "no engine"

    [at] = [m for m in messages(log, "rewarded") if (m.partition, m.offset) == place(talk)]
    assert talk["topic"] == log.topic_name("rewarded")
    assert at.value[2:10].hex() == talk["schema"]
    steps = {(m.partition, m.offset): m.value for m in messages(log, STEPS)}
    for one in talk["steps"]:
        found = Codec().decode(steps[talk["partition"], one["step_source_offset"]])
        assert isinstance(found, Step)
        assert found.step_id == one["step_id"]


def place(row: dict[str, Any]) -> tuple[int, int]:
    return row["partition"], row["offset"]


def test_formats_and_shapes_say_the_same(log: Connection, tmp_path: Path) -> None:
    nested = exported(log, tmp_path / "a.jsonl")
    assert exported(log, tmp_path / "a.parquet") == nested
    flat = exported(log, tmp_path / "b.jsonl", per="step")
    assert exported(log, tmp_path / "b.parquet", per="step") == flat
    again = [
        {**{k: v for k, v in row.items() if k != "steps"}, **one}
        for row in nested
        for one in row["steps"]
    ]
    assert flat == again


def test_feedback_finds_a_row_that_was_written_before_it_came(
    connection: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.export.parquet.ROW_GROUP_BYTES", 1)
    monkeypatch.setattr("replay.export.shards.MIB", 1)
    topics.create(connection, partitions=1)
    within = feedback(2.0, "t", id="within")
    talk = [feedback(1.0, "t", id="before"), step("t-0"), within, step("t-1", index=1)]
    late = [feedback(3.0, "t", id="late"), feedback(9.0, "t", step_id="t-0", id="of a step")]
    others = [record for number in range(3) for record in run_of(f"other-{number}")]
    write(connection, STEPS, [*talk, end("t", steps=2), *others, within, *late, *late])
    for format, per in product(("parquet", "jsonl"), ("trajectory", "step")):
        rows = exported(connection, tmp_path / format / per, format=format, per=per, shard_mib=1)
        told = [row for row in rows if row["trajectory_uid"] == "t"]
        assert len(told) == (1 if per == "trajectory" else 2)
        for row in told:
            ids = [given["feedback_id"] for given in row["feedback"]]
            assert ids == ["before", "within", "late", "of a step"]
            assert row["reward"] == 3.0  # a copy of what was said before does not undo it
        assert len(by_uid(rows)) == 4


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_late_feedback_on_a_step_changes_a_sum_that_was_written_before_it_came(
    connection: Connection, tmp_path: Path, format: str
) -> None:
    topics.create(connection, partitions=1)
    rated = [step("t-0", reward=0.5), feedback(0.25, step_id="t-0"), step("t-1", index=1)]
    own = [step("u-0", "u", reward=0.5), end("u", reward=2.0)]
    late = [feedback(4.0, step_id="t-1"), feedback(8.0, "u", step_id="u-0")]
    write(connection, STEPS, [*rated, end("t", steps=2), *own, *late])
    for per in ("trajectory", "step"):
        rows = exported(connection, tmp_path / per, format=format, per=per)
        rewards = {(r["trajectory_uid"], r["reward"], r["reward_from_steps"]) for r in rows}
        assert rewards == {("t", 4.25, True), ("u", 2.0, False)}


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_groups_that_were_posted_are_trajectories_too(
    log: Connection, tmp_path: Path, format: str
) -> None:
    write(log, REWARDED, [posted()])
    rows = by_uid(exported(log, tmp_path / "out", topic="rewarded", format=format))
    assert rows.keys() == {"t", "r", "empty", "hole", "g/0", "g/1"}
    assert [uid for uid, row in rows.items() if row["posted"]] == ["g/0", "g/1"]
    assert [rows[uid]["reward"] for uid in ("g/0", "g/1")] == [0.25, 0.75]
    first, second = rows["g/1"]["steps"]
    assert (first["prompt_ids"], first["response_ids"]) == ([11], [12, 13])
    assert (second["prompt_ids"], second["response_ids"]) == ([11, 12, 13, 14], [15])
    assert (first["logprobs"], second["logprobs"]) == ([-0.5, -0.25], [-2.0])
    assert (first["advantages"], second["advantages"]) == ([0.5, 1.5], [2.5])
    assert rows["t"]["steps"][0]["advantages"] is None
    where = exported(log, tmp_path / "chosen", topic="rewarded", format=format, where=["task=sums"])
    assert [row["trajectory_uid"] for row in where] == ["t"]


@pytest.mark.heavy
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_datasets_loads_it(
    log: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = exported(log, tmp_path / "out", format=format)
    loader = "parquet" if format == "parquet" else "json"
    files = str(tmp_path / "out" / f"data-*.{format}")
    loaded = datasets.load_dataset(
        loader, data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded["trajectory_uid"][:] == [row["trajectory_uid"] for row in rows]
    talk = by_uid(loaded.to_list())["t"]
    assert [one["prompt_ids"] for one in talk["steps"]] == conversation(3)[1]


def test_a_folder_has_files_of_bounded_size(
    log: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.export.parquet.ROW_GROUP_BYTES", 1)
    monkeypatch.setattr("replay.export.shards.MIB", 1)
    rows = exported(log, tmp_path / "out", shard_mib=1)
    assert len(list((tmp_path / "out").glob("data-*.parquet"))) > 1
    assert without_positions(rows) == without_positions(exported(log, tmp_path / "whole"))
    assert "one trajectory per row" in (tmp_path / "out" / "README.md").read_text()


def test_text_needs_the_tokenizer_of_the_steps(connection: Connection, tmp_path: Path) -> None:
    from gateway.tokens.renderer import Renderer

    build_tokenizer(tmp_path / "tokenizer")
    mark = Renderer.load(str(tmp_path / "tokenizer")).fingerprint
    fill(connection)
    write(connection, STEPS, [step("x-0", "x", ids=(72, 105), tokenizer=mark), end("x")])
    rows = by_uid(exported(connection, tmp_path / "a.jsonl", tokenizer=tmp_path / "tokenizer"))
    [said] = rows["x"]["steps"]
    assert len(said["prompt_text"]) == 2
    assert len(said["response_text"]) == 2

    write(connection, STEPS, [step("y-0", "y", tokenizer="another"), end("y")])
    with pytest.raises(Fatal, match=r"Step y-0 was made with tokenizer another, but .* has"):
        exported(connection, tmp_path / "b.jsonl", tokenizer=tmp_path / "tokenizer")
    assert not [path for path in tmp_path.iterdir() if "b.jsonl" in path.name]


def test_nothing_is_written_when_something_is_wrong(log: Connection, tmp_path: Path) -> None:
    settings = {**log.model_dump(), "into": tmp_path / "out", "topic": "steps"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"from_": 1_000}, "The range selects nothing"),
        ({"of_run": ("run",), "from_version": 7}, "Version 7 of run run does not exist"),
        ({"channel": "nobody's"}, "No trajectory of .* matches the selection"),
        ({"rewards": "missing", "topic": "rewarded"}, "rewarded.missing does not exist"),
    ]
    for wrong, told in cases:
        with pytest.raises(Fatal, match=told):
            export(DatasetExportSettings(**{**settings, **wrong}))
    future = b"\xc3\x01" + b"\x07" * 8 + b"whatever"
    produce_raw(log, future)
    with pytest.raises(
        Fatal,
        match=r"Offset \d+ of partition 0 of .*steps cannot be read: this version knows no schema",
    ):
        export(DatasetExportSettings(**settings))
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_are_no_record_are_passed_over(log: Connection, tmp_path: Path) -> None:
    produce_raw(log, single_object_header(Step) + b"rubbish")
    settings = DatasetExportSettings(**log.model_dump(), into=tmp_path / "out", topic="steps")
    assert "1 records were not written by steplog" in export(settings)


def produce_raw(connection: Connection, value: bytes) -> None:
    from confluent_kafka import Producer

    producer = Producer(producer_options(connection))
    producer.produce(connection.topic_name(STEPS), value, partition=0)
    assert producer.flush(30) == 0


def test_a_place_that_has_something_is_left_alone(log: Connection, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    exported(log, tmp_path / "out")  # an empty folder is as good as none
    before = sorted((tmp_path / "out").iterdir())
    with pytest.raises(Fatal, match=r"out is not empty; choose another --into"):
        exported(log, tmp_path / "out")
    assert sorted((tmp_path / "out").iterdir()) == before


KILLED = """
import os, signal, sys
from replay.export import parquet
from replay.export.command import export
from replay.settings import DatasetExportSettings
write = parquet.ParquetWriter._write
def kill(*given):
    write(*given)
    os.kill(os.getpid(), signal.SIGKILL)
parquet.ParquetWriter._write = kill
export(DatasetExportSettings(bootstrap=sys.argv[1], topic_prefix=sys.argv[2], into=sys.argv[3]))
"""


def test_a_killed_export_leaves_nothing_that_looks_complete(
    log: Connection, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, log.bootstrap, log.topic_prefix, str(out)]
    ended = processes.run(command, env={**os.environ, "PYTHONPATH": "."}, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".out.part"]
    exported(log, out, topic="rewarded")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_range_that_has_expired_is_one_sentence(connection: Connection, tmp_path: Path) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    fill(connection)
    first = write(connection, STEPS, run_of("late"))[0]
    cut = TopicPartition(connection.topic_name(STEPS), first.partition, first.offset)
    admin = AdminClient(connection.confluent())
    for future in admin.delete_records([cut]).values():
        future.result(30)
    with pytest.raises(OffsetLost, match=r"Offset 1 of partition \d of .*steps has expired"):
        exported(connection, tmp_path / "out", from_=1)
    assert list(tmp_path.iterdir()) == []
