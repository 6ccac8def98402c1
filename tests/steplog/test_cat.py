"""`steplog cat`: every record of a topic as one JSON line, whatever was written there."""

import json
import signal
import subprocess
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer as ConfluentProducer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pool import topics
from pool.connection import Connection
from pool.producers.output import producer_options
from pool.readers.reader import TopicReader
from pool.topics import STEPS, TRAJECTORIES
from schemas import Codec, Position, Record, Registration
from steplog.cat import CatSettings
from steplog.kafka import local_kafka
from tests import processes
from tests.pool.records import step
from tests.pool.topic_content import conversation
from tests.steplog.command import STEPLOG, reaching, steplog

pytestmark = pytest.mark.broker

CODEC = Codec()
NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def log(kafka: local_kafka.Broker) -> Connection:
    """A log that the tests which only read share."""
    connection = new_log(kafka, partitions=2)
    turns, _ = conversation(3)
    values: list[Record | bytes | None] = [*turns, b"\x07no record", None]
    for minute, value in enumerate(values):
        write(connection, "p", value, NOON + timedelta(minutes=minute))
    for minute in range(3):
        write(connection, elsewhere("p"), step(f"e{minute}"), NOON + timedelta(minutes=minute))
    return connection


def new_log(kafka: local_kafka.Broker, partitions: int) -> Connection:
    prefix = f"test-{uuid.uuid4().hex[:8]}."
    connection = Connection(bootstrap=kafka.bootstrap, topic_prefix=prefix)
    topics.create(connection, partitions=partitions)
    return connection


def partition_of(key: str, partitions: int = 2) -> int:
    return TopicReader("", partitions, None).partition_of(key)


def elsewhere(key: str) -> str:
    """A key of the other partition."""
    others = (f"{key}{number}" for number in range(100))
    return next(other for other in others if partition_of(other) != partition_of(key))


def write(
    connection: Connection,
    key: str,
    value: Record | bytes | None,
    time: datetime = NOON,
    topic: str = STEPS,
    headers: Iterable[tuple[str, str | bytes | None]] = (),
) -> None:
    producer = ConfluentProducer(producer_options(connection))
    producer.produce(
        connection.topic_name(topic),
        CODEC.encode(value) if isinstance(value, Record) else value,
        key,
        timestamp=int(time.timestamp() * 1000),
        headers=list(headers),
    )
    assert producer.flush(30) == 0


def cat(connection: Connection, *words: str, topic: str = STEPS) -> list[dict[str, Any]]:
    done = steplog("cat", topic, *words, *reaching(connection))
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def places(lines: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return sorted((line["partition"], line["offset"]) for line in lines)


@contextmanager
def following(connection: Connection, *words: str) -> Iterator["subprocess.Popen[str]"]:
    command = [STEPLOG, "cat", STEPS, "--follow", *words, *reaching(connection)]
    process = processes.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def next_line(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line: dict[str, Any] = json.loads(process.stdout.readline())
    return line


def test_every_record_is_a_line_with_its_place_and_fields(log: Connection) -> None:
    lines = [line for line in cat(log) if line["key"] == "p"]
    _, prompts = conversation(3)
    assert [line["type"] for line in lines] == ["Step"] * 3 + ["undecodable", "tombstone"]
    assert [line["offset"] for line in lines] == [0, 1, 2, 3, 4]
    assert {line["partition"] for line in lines} == {partition_of("p")}
    assert lines[1]["timestamp"] == "2024-01-01T12:01:00+00:00"
    assert [line["prompt_ids"] for line in lines[:3]] == prompts
    assert lines[2]["parent"] == "s1"
    assert lines[2]["metadata"] == {}
    assert lines[3]["reason"] == "the value begins with 076e, which is no framing of ours"
    assert bytes.fromhex(lines[3]["value"]) == b"\x07no record"


def test_an_offset_is_the_first_of_every_partition(log: Connection) -> None:
    lines = cat(log, "--from", "2")
    here, there = partition_of("p"), partition_of(elsewhere("p"))
    assert places(lines) == sorted([(here, 2), (here, 3), (here, 4), (there, 2)])
    _, prompts = conversation(3)
    assert [line["prompt_ids"] for line in lines if line.get("step_id") == "s2"] == [prompts[2]]
    assert cat(log, "--from", "1000000") == []


def test_a_time_is_where_to_begin(log: Connection) -> None:
    here, there = partition_of("p"), partition_of(elsewhere("p"))
    expected = sorted([(here, 2), (here, 3), (here, 4), (there, 2)])
    assert places(cat(log, "--from", "2024-01-01T12:01:30Z")) == expected
    assert places(cat(log, "--from", "2024-01-01T13:01:30+01:00")) == expected
    assert cat(log, "--from", "2024-01-02") == []


def test_a_key_is_all_that_is_shown(log: Connection) -> None:
    lines = cat(log, "--key", elsewhere("p"))
    assert [line["step_id"] for line in lines] == ["e0", "e1", "e2"]
    assert cat(log, "--key", "nobody's") == []


def test_a_limit_is_kept(log: Connection) -> None:
    assert [line["offset"] for line in cat(log, "--limit", "2", "--key", "p")] == [0, 1]
    assert cat(log, "--limit", "0", "--follow") == []


def test_headers_and_a_registration_keep_their_own_values(log: Connection) -> None:
    where = Registration(
        trajectory_uid="t", prompt_uid="p", run="r", begins=Position(partition=77, offset=2**40)
    )
    headers = [("trace", b"abc"), ("empty", None)]
    now = datetime.now(UTC)  # this topic forgets what is older than a week
    write(log, "t", where, now, TRAJECTORIES, headers)
    (line,) = cat(log, topic=TRAJECTORIES)
    assert line["partition"] == partition_of("t")
    assert line["begins"] == {"partition": 77, "offset": 2**40}
    assert line["headers"] == {"trace": "abc", "empty": None}


def test_a_prompt_that_cannot_be_completed_says_why(kafka: local_kafka.Broker) -> None:
    log = new_log(kafka, partitions=1)
    turns, _ = conversation(3)
    write(log, "p", turns[2])
    write(log, "p", step("whole", ids=(5, 6), reward=float("nan")))
    broken, whole = cat(log)
    assert broken["prompt_ids"] is None
    assert broken["problem"] == "step s2 extends s1, which is not in the log"
    assert whole["prompt_ids"] == [5, 6]
    assert "problem" not in whole


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_following_shows_what_comes_until_it_is_ended(
    kafka: local_kafka.Broker, number: signal.Signals, status: int
) -> None:
    log = new_log(kafka, partitions=2)
    write(log, "p", step("old"))
    with following(log) as process:
        assert next_line(process)["step_id"] == "old"
        write(log, "p", step("new"))
        assert next_line(process)["step_id"] == "new"
        write(log, elsewhere("p"), step("newer"))
        assert next_line(process)["step_id"] == "newer"
        process.send_signal(number)
        assert process.communicate(timeout=30) == ("", "")
        assert process.returncode == status


def test_following_with_a_limit_ends_with_the_last_line(log: Connection) -> None:
    with following(log, "--limit", "2", "--key", "p") as process:
        said, complaint = process.communicate(timeout=60)
    assert [json.loads(line)["offset"] for line in said.splitlines()] == [0, 1]
    assert (process.returncode, complaint) == (0, "")


def test_a_reader_that_has_seen_enough_is_no_error(kafka: local_kafka.Broker) -> None:
    log = new_log(kafka, partitions=1)
    for number in range(4):
        write(log, "p", step(f"s{number}", ids=range(60_000)))
    command = [STEPLOG, "cat", STEPS, *reaching(log)]
    process = processes.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert next_line(process)["step_id"] == "s0"
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (141, "")
    process.stderr.close()


def test_a_tokenizer_turns_ids_into_text(
    kafka: local_kafka.Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = {"two": 0, "plus": 1, "is": 2, "four": 3, "<eos>": 4}
    backend = Tokenizer(WordLevel(words, unk_token="<eos>"))
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.save_pretrained(tmp_path / "tiny")
    log = new_log(kafka, partitions=1)
    write(log, "p", step("s", ids=(0, 1, 0, 2), response=(3, 4)))
    write(log, "p", step("strange", ids=(-1, 2**31 - 1), response=(3,)))
    write(log, "p", conversation(2)[0][1])
    line, strange, broken = cat(log, "--tokenizer", str(tmp_path / "tiny"))
    assert line["prompt_text"] == "two plus two is"
    assert line["response_text"] == "four <eos>"
    assert line["prompt_ids"] == [0, 1, 0, 2]
    assert strange["response_text"] == "four"
    assert broken["prompt_text"] is None


def test_a_folder_that_is_no_tokenizer_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for folder, told in (
        ("broken", "No tokenizer could be loaded from broken: "),
        ("gone", "gone is not a folder. --tokenizer must be the folder of a tokenizer."),
    ):
        done = steplog("cat", STEPS, "--tokenizer", folder)
        assert (done.returncode, done.stdout) == (1, "")
        (sentence,) = done.stderr.splitlines()
        assert sentence.startswith(f"steplog: {told}")


def test_what_cannot_be_shown_is_one_sentence(connection: Connection) -> None:
    unknown = steplog("cat", "stops", *reaching(connection))
    assert unknown.returncode == 2
    assert unknown.stderr == (
        "steplog: TOPIC cannot be used: there is no topic 'stops'; choose one of"
        " steps, rewarded, policy, ledger, trajectories, atropos, dead-letters\n"
    )
    missing = steplog("cat", STEPS, *reaching(connection))
    assert missing.returncode == 1
    assert missing.stderr == (
        f"steplog: Topic {connection.topic_name(STEPS)} does not exist at {connection.bootstrap};"
        " `steplog topics list` shows those that do\n"
    )
    when = steplog("cat", STEPS, "--from", "yesterday", *reaching(connection))
    assert when.returncode == 2
    assert when.stderr == (
        "steplog: --from cannot be used: it is neither an offset nor a time like"
        " 2030-01-31T12:00:00Z\n"
    )


def test_a_topic_may_be_named_with_its_prefix() -> None:
    assert CatSettings(topic="steplog.steps").topic == "steps"
    assert CatSettings(topic="mine.steps", topic_prefix="mine.").topic == "steps"
