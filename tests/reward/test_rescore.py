"""A part of the log is scored again, beside the first rewards: each trajectory once, whatever dies."""

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer as ConfluentProducer

from pool.connection import Connection
from pool.core.group_assembler import GroupAssembler
from pool.core.groups import Group, GroupRules
from pool.core.progress import Received
from pool.producers.output import producer_options
from pool.topics import DEAD_LETTERS, REWARDED, STEPS, TRAJECTORIES, find_topics
from reward.rescore import command as rescore
from reward.settings import RescoreSettings
from schemas import Feedback, Step, TrajectoryEnd
from servicekit.errors import Fatal
from tests import processes
from tests.pool.log import messages, records, write
from tests.pool.records import end, feedback, note, step
from tests.reward.running import answered, ends, running_worker, wait_for, wait_for_ends
from tests.steplog.command import STEPLOG, reaching, steplog

pytestmark = pytest.mark.broker

FUNCTIONS = """
import time
from pathlib import Path

scored = 0

def length(trajectory):
    return float(len(trajectory.steps[0].response_ids))

def halting(trajectory):
    global scored
    scored += 1
    while scored > 150 and Path(__file__).with_name("halt").exists():
        time.sleep(0.01)
    return 1.0

def picky(trajectory):
    if trajectory.uid == "bad":
        raise ValueError("not this one")
    return 2.0

def text(trajectory):
    return float(len(trajectory.text))
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(FUNCTIONS)
    return file


def asked(log: Connection, function: str, **settings: Any) -> RescoreSettings:
    return RescoreSettings(**{**log.model_dump(), "function": (function,), **settings})


@pytest.fixture(autouse=True)
def signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C stays the tests' own."""
    monkeypatch.setattr(rescore, "stop_on_signals", threading.Event)


def run(log: Connection, function: str, **settings: Any) -> dict[str, Any]:
    """In this process; gives the last line."""
    lines: list[str] = []
    assert rescore.rescore(asked(log, function, **settings), lines.append) == 0
    last: dict[str, Any] = json.loads(lines[-1])
    return last


def test_a_range_is_scored_again_and_the_first_rewards_stay(
    log: Connection, functions: Path
) -> None:
    early, early_end = answered("early", "abc")
    before = write(log, STEPS, [early, *answered("bad", "ab"), note("early-0", True, "early")])
    write(log, STEPS, [early_end, feedback(9.0, "early"), step("open", "open")])
    write(log, STEPS, answered("later", "abcd"))
    write(log, STEPS, answered("other", "abcd", channel="val", status="failed"))
    write(log, STEPS, answered("unbound", "abcd", channel="unbound"))
    words = [*reaching(log), "--function", f"{functions}:picky", "--into", "beside"]
    done = steplog("replay", "rescore", *words, "--from", str(before[-1].offset))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["phase"], told["scored"], told["unscored"]) == ("done", 2, 1)
    assert told["next"][0] == "steplog replay diff --with beside"

    found = ends(log, "rewarded.beside")
    assert found.keys() == {"early", "later", "other"}, "what ended before the range is not in it"
    assert [found[uid].reward for uid in found] == [2.0, 2.0, None]
    assert [(r.name, len(r.version)) for r in found["early"].rewards] == [("picky", 12)]
    copied = records(log, "rewarded.beside")
    kinds = [type(record).__name__ for record in copied]
    pair = ["Step", "TrajectoryEnd"]
    assert kinds == ["Step", "StepNote", "TrajectoryEnd", "Feedback", *pair, *pair]
    assert all(r.source is not None for r in copied if isinstance(r, Step | Feedback))
    assert not records(log, REWARDED) and not messages(log, DEAD_LETTERS)

    again = run(log, f"{functions}:picky", into="beside", from_=before[-1].offset)
    assert (again["trajectories"], again["scored"]) == (3, 0)
    assert ends(log, "rewarded.beside") == found
    with pytest.raises(
        Fatal, match=r"is scored by picky .* would score with length .* another tag"
    ):
        run(log, f"{functions}:length", into="beside", from_=before[-1].offset)
    with pytest.raises(Fatal, match=r"was begun with another range, filter or --channels"):
        run(log, f"{functions}:picky", into="beside")


def test_a_function_that_fails_is_told_in_the_topic_of_its_tag_only(
    log: Connection, functions: Path
) -> None:
    for uid in ("good", "bad"):
        write(log, STEPS, answered(uid, "x", prompt=uid))
    told = run(log, f"{functions}:picky", into="failing")
    assert (told["scored"], told["failed"]) == (1, 1)
    found = ends(log, "rewarded.failing")
    assert found["bad"].status == "failed" and "not this one" in str(found["bad"].reason)
    assert not messages(log, DEAD_LETTERS)


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_and_each_trajectory_is_there_once(
    log: Connection, functions: Path
) -> None:
    uids = [f"t{number}" for number in range(600)]
    made = [answered(uid, "x", prompt=f"p{number % 40}") for number, uid in enumerate(uids)]
    write(log, STEPS, [record for trajectory in made for record in trajectory])
    words = [STEPLOG, "replay", "rescore", *reaching(log), "--into", "killed"]
    words += ["--function", f"{functions}:halting?timeout_s=1000", "--at-once", "50"]
    topic = "rewarded.killed"
    halt = functions.with_name("halt")
    halt.touch()
    process = processes.Popen(words, stdout=subprocess.PIPE)
    try:
        wait_for(lambda: topic in find_topics(log) and len(ends(log, topic)) > 60)
    finally:
        process.kill()
        process.communicate()
    assert len(ends(log, topic)) < len(uids), "it was over before it was killed"
    halt.unlink()
    write(log, STEPS, answered("afterwards", "x"))
    again = processes.run(words, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert ends(log, topic).keys() == set(uids), "the range ends where it ended at first"
    by_prompt: dict[str, list[int]] = {}
    for record in records(log, topic):
        assert isinstance(record, Step | TrajectoryEnd) and record.source is not None
        by_prompt.setdefault(record.prompt_uid, []).append(record.source.offset)
    assert all(offsets == sorted(offsets) for offsets in by_prompt.values())


def unreadable(log: Connection) -> None:
    """A value that a later version may have written."""
    producer = ConfluentProducer(producer_options(log))
    producer.produce(log.topic_name(STEPS), b"\xc3\x01\x01\x02\x03\x04\x05\x06\x07\x08future", "p")
    assert producer.flush(30) == 0


def test_what_cannot_be_done_is_one_sentence_and_nothing_is_written(
    log: Connection, functions: Path, tokenizer: Path
) -> None:
    length = f"{functions}:length"
    with pytest.raises(Fatal, match=r"There is nothing to read: .* is empty"):
        run(log, length, into="bad")
    write(log, STEPS, [step("s", tokenizer="0123456789abcdef"), end()])
    refused: list[tuple[str, dict[str, Any]]] = [
        ("The range selects nothing", {"from_": 500}),
        ("matches the filter", {"where": ("task=none",)}),
        ("Version 3 of run run does not exist", {"of_run": ("run",), "from_version": 3}),
        ("lower-case letters, digits and dashes", {"into": "Not.So"}),
        (r"recorded with 0123456789abcdef", {"tokenizer": str(tokenizer)}),
    ]
    for sentence, settings in refused:
        with pytest.raises(Fatal, match=sentence):
            run(log, length, **{"into": "bad", **settings})
    with pytest.raises(Fatal, match="There is no reward function 'none'"):
        run(log, "none", into="bad")
    unreadable(log)
    with pytest.raises(
        Fatal, match=r"Offset 2 of partition . of .*steps cannot be read: .* no schema"
    ):
        run(log, length, into="bad")
    assert not [topic for topic in find_topics(log) if topic.startswith("rewarded.")]


@pytest.mark.slow
def test_a_live_worker_does_not_read_with_another_tokenizer(
    log: Connection, functions: Path, tokenizer: Path
) -> None:
    write(log, STEPS, [step("s", tokenizer="0123456789abcdef"), end()])
    write(log, STEPS, answered("same", "abc", prompt="q"))
    words = ("--function", f"{functions}:text", "--tokenizer", str(tokenizer))
    with running_worker(log, *words) as worker:
        found = wait_for_ends(log, 2, worker)
    assert "were recorded with 0123456789abcdef" in str(found["t"].reason)
    assert found["same"].reward == 3.0


@pytest.mark.slow
def test_two_reward_versions_run_side_by_side_on_the_live_stream(
    log: Connection, functions: Path
) -> None:
    first = running_worker(log, "--function", f"{functions}:length")
    second = running_worker(log, "--function", f"{functions}:picky", "--into", "second")
    write(log, STEPS, [*answered("a", "abc", group_size=2), step("late", "late", "l", deadline=1)])
    with first as one, second as other:
        wait_for_ends(log, 2, one)
        wait_for_ends(log, 2, other, "rewarded.second")
        write(log, STEPS, [*answered("b", "abcde"), *answered("bad", "x", prompt="q")])
        rewards = wait_for_ends(log, 4, one)
        others = wait_for_ends(log, 4, other, "rewarded.second")
    assert [rewards[uid].reward for uid in ("a", "b", "bad", "late")] == [4.0, 6.0, 2.0, None]
    assert [others[uid].reward for uid in ("a", "b", "bad", "late")] == [2.0, 2.0, None, None]
    assert (rewards["late"].status, others["late"].status) == ("expired", "expired")
    assert len(records(log, TRAJECTORIES)) == 1, "one worker keeps the deadlines"
    assert not messages(log, DEAD_LETTERS), "what the second one failed on stands in its topic"
    assert group_rewards(log, REWARDED) == [4.0, 6.0]
    assert group_rewards(log, "rewarded.second") == [2.0, 2.0]

    told = run(log, f"{functions}:length", into="third")
    assert told["trajectories"] == 4, "the log ends with the marker of a transaction"
    words = ("--function", f"{functions}:length", "--into", "second")
    refused = steplog("reward", *reaching(log), *words)
    assert refused.returncode == 1
    assert "rewarded.second is scored by picky" in refused.stderr


def group_rewards(log: Connection, topic: str) -> list[float | None]:
    """Of the group of prompt p, as a trainer has it."""
    assemblers: dict[int, GroupAssembler] = {}
    codec = log.codec()
    for message in messages(log, topic):
        assembler = assemblers.setdefault(message.partition, GroupAssembler(GroupRules()))
        item = assembler.feed(
            Received(codec.decode(message.value), message.partition, message.offset)
        )
        if isinstance(item, Group) and item.prompt_uid == "p":
            return [item.reward(member) for member in item.members.values()]
    raise AssertionError(f"{topic} has no group of prompt p")


@pytest.mark.slow
def test_a_live_worker_goes_on_where_a_rescoring_of_its_tag_has_ended(
    log: Connection, functions: Path
) -> None:
    begun, ended = answered("begun", "ab", prompt="q")
    write(log, STEPS, [*answered("before", "x"), begun])
    run(log, f"{functions}:length", into="goes-on")
    write(log, STEPS, [ended, *answered("after", "abc")])
    words = ("--function", f"{functions}:length", "--into", "goes-on")
    with running_worker(log, *words) as worker:
        found = wait_for_ends(log, 3, worker, "rewarded.goes-on")
        assert worker.terminate() == 0
    assert {uid: found[uid].reward for uid in found} == {"before": 2.0, "begun": 3.0, "after": 4.0}
    with pytest.raises(Fatal, match="was begun with another range"):
        run(log, f"{functions}:length", into="goes-on", until=1)
