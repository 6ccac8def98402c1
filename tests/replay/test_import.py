"""What was exported comes back as it was; what cannot is one sentence, and nothing is written."""

import json
from pathlib import Path
from typing import Any

import pytest

from pool import topics
from pool.connection import Connection
from pool.topics import POLICY, REWARDED, STEPS
from replay.importer.command import ORIGIN_HEADER, import_files
from replay.settings import ImportSettings
from schemas import PolicyVersion, Step, TrajectoryEnd
from schemas.packing import unpack_ids
from servicekit.errors import Fatal
from tests.pool.log import messages, records, write
from tests.replay.logs import exported, fill, posted, without_positions

pytestmark = pytest.mark.broker


@pytest.fixture
def log(connection: Connection) -> Connection:
    fill(connection)
    return connection


@pytest.fixture
def other(connection: Connection) -> Connection:
    """Another log on the same broker."""
    other = connection.model_copy(update={"topic_prefix": f"other-{connection.topic_prefix}"})
    topics.create(other, partitions=3)
    return other


def import_(connection: Connection, *files: Path, **settings: Any) -> str:
    return import_files(ImportSettings(**connection.model_dump(), files=files, **settings))


def whole(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what was invalid, which no import brings back."""
    return without_positions([row for row in rows if row["problem"] is None])


@pytest.mark.parametrize("per", ["trajectory", "step"])
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_round_trip_changes_nothing_but_places(
    log: Connection, other: Connection, tmp_path: Path, per: str, format: str
) -> None:
    first = exported(log, tmp_path / "first", per=per, format=format)
    assert "1 trajectories were invalid, or" in import_(other, tmp_path / "first")
    second = exported(other, tmp_path / "second", per=per, format=format)
    assert whole(second) == whole(first)
    assert all(m.headers[0][0] == ORIGIN_HEADER for m in messages(other, STEPS))
    stored = [r for r in records(other, STEPS) if isinstance(r, Step) and r.parent is not None]
    assert len(stored) == 2  # prompts are deltas again


def test_a_posted_group_is_left_out_and_counted(
    log: Connection, other: Connection, tmp_path: Path
) -> None:
    write(log, REWARDED, [posted()])
    exported(log, tmp_path / "all", topic="rewarded")
    told = import_(other, tmp_path / "all", into_topic="rewarded", run="archive")
    assert told.endswith("; 3 trajectories were invalid, or posted by an environment: left out")
    exported(log, tmp_path / "posted", topic="rewarded", of_run=[posted().run])
    with pytest.raises(Fatal, match=r"no Steps in .* that can be imported"):
        import_(other, tmp_path / "posted", into_topic="rewarded", run="archive")


def test_rewards_come_back_into_a_topic_of_their_own(
    log: Connection, other: Connection, tmp_path: Path
) -> None:
    first = exported(log, tmp_path / "first", topic="rewarded")
    import_(other, tmp_path / "first", into_topic="rewarded", rewards="old", run="archive")
    second = exported(other, tmp_path / "second", topic="rewarded", rewards="old")
    expected = [{**row, "run": "archive"} for row in whole(first)]
    assert whole(second) == expected


def test_files_may_be_imported_twice_and_what_is_there_is_left_out(
    log: Connection, other: Connection, tmp_path: Path
) -> None:
    exported(log, tmp_path / "all")
    exported(log, tmp_path / "val.jsonl", channel="val")
    import_(other, tmp_path / "val.jsonl")
    told = import_(other, tmp_path / "all", tmp_path / "val.jsonl")
    assert told.startswith("2 trajectories, 3 Steps")
    before = messages(other, STEPS)
    assert import_(other, tmp_path / "all").startswith("0 trajectories")
    assert messages(other, STEPS) == before


def test_a_run_that_is_trained_here_gets_no_foreign_steps(
    log: Connection, other: Connection, tmp_path: Path
) -> None:
    exported(log, tmp_path / "all")
    opened = PolicyVersion(run="run", incarnation=1, version=0, phase="opened")
    write(other, POLICY, [opened])
    with pytest.raises(Fatal, match=r"belongs to run run, which is trained in this log.*--run"):
        import_(other, tmp_path / "all")
    assert messages(other, STEPS) == []
    assert import_(other, tmp_path / "all", dry_run=True, run="x") == "5 Steps can be imported"
    assert messages(other, STEPS) == []
    import_(other, tmp_path / "all", run="archive")
    assert {record.run for record in records(other, STEPS)} == {"archive"}  # type: ignore[attr-defined]


def white_box(uid: str, index: int, **fields: Any) -> dict[str, Any]:
    return {
        "trajectory_uid": uid,
        "prompt_uid": "p",
        "step_index": index,
        "prompt_ids": [*range(20), *range(100, 100 + index)],
        "response_ids": [7, 8],
        "rollout_log_probs": [-0.25, -0.5],
        "policy_version": 4,
        "routed_experts": "ignored",
        **fields,
    }


def test_a_white_box_dump_becomes_steps(other: Connection, tmp_path: Path) -> None:
    dump = tmp_path / "dump.jsonl"
    lines = [
        {"steps": [white_box("a", 0), white_box("b", 0, sampling={"top_p": 0.9})]},
        white_box("b", 1, rollout_log_probs=None),
        {
            "steps": [
                white_box(
                    "a",
                    1,
                    is_last=True,
                    reward=1.5,
                    metadata={"k": 1},
                    sampling={"temperature": 0.7},
                )
            ]
        },
    ]
    dump.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(Fatal, match=r"dump.jsonl:\d cannot be imported: .*does not name its run"):
        import_(other, dump)
    assert "2 trajectories, 4 Steps" in import_(other, dump, run="agents", channel="val")
    found = records(other, STEPS)
    steps = [record for record in found if isinstance(record, Step)]
    ends = {r.trajectory_uid: r for r in found if isinstance(r, TrajectoryEnd)}
    assert (ends["a"].status, ends["b"].status) == ("completed", "cancelled")
    assert ends["b"].reason == "the dump has no Step of it with is_last"
    last = next(step for step in steps if step.is_last)
    assert (last.run, last.channel, last.reward, last.metadata) == (
        "agents",
        "val",
        1.5,
        '{"k": 1}',
    )
    assert json.loads(last.sampling) == {"temperature": 0.7}
    assert last.segments[0].version == 4
    assert last.prefix_length == 20
    assert unpack_ids(last.prompt_ids).tolist() == [100]
    reasons = [step.not_trainable for step in steps if step.trajectory_uid == "b"]
    assert reasons == [
        "the distribution was changed by top_p",
        "it was submitted without rollout_log_probs",
    ]
    assert not any(step.not_trainable for step in steps if step.trajectory_uid == "a")
    assert import_(other, dump, run="agents").startswith("0 trajectories")


def test_a_bad_line_is_one_sentence_and_nothing_is_written(
    log: Connection, other: Connection, tmp_path: Path
) -> None:
    rows = exported(log, tmp_path / "all.jsonl", channel="train")
    talk = next(row for row in rows if row["trajectory_uid"] == "t")
    bad = tmp_path / "bad.jsonl"
    short = {**talk["steps"][0], "logprobs": [0.0]}
    cases: list[tuple[Any, str]] = [
        ({**talk, "format": 2}, r"format is 2: a later version exported it"),
        ({**talk, "status": "unheard of"}, r"Invalid enum value 'unheard of'"),
        ({**talk, "steps": [short]}, r"1 Steps here, but its trajectory_steps is 3"),
        ({**talk, "steps": [short, *talk["steps"][1:]]}, r"2 response ids come with 1 logprobs"),
        ({**talk, "steps": [{**short, "prompt_ids": [2**31]}]}, r"are not valid numbers: signed"),
        (
            {**talk, "steps": [{**short, "logprobs": ["low"]}]},
            r"are not valid numbers: must be real",
        ),
        ({**talk, "metadata": "[1]"}, r"not a JSON object"),
        ("half a li", r"JSON is malformed|Expected `object`"),
    ]
    for line, told in cases:
        text = json.dumps(line) if isinstance(line, dict) else line
        bad.write_text(json.dumps(talk | {"trajectory_uid": "fine"}) + "\n" + text)
        with pytest.raises(Fatal, match=rf"bad.jsonl:2 cannot be imported: .*({told})"):
            import_(other, bad)
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and so on")
    with pytest.raises(Fatal, match=r"x.parquet cannot be imported"):
        import_(other, tmp_path / "x.parquet")
    with pytest.raises(Fatal, match=r"nowhere.jsonl cannot be read: No such file"):
        import_(other, tmp_path / "nowhere.jsonl")
    assert messages(other, STEPS) == []
