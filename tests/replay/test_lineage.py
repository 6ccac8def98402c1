"""What the log tells of a trajectory, whatever became of it."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import ANY

import msgspec
import numpy as np
import pytest

from pool import topics
from pool.connection import Connection
from pool.producers.producer import Producer
from pool.topics import REWARDED, STEPS, TRAJECTORIES
from replay.lineage.command import lineage
from replay.settings import LineageSettings
from schemas import Position, Record, Registration, Reward, ScoredGroup, TrajectoryEnd
from schemas.packing import pack_ids
from servicekit.errors import Fatal
from steplog import cli
from steplog.kafka import local_kafka
from tests.pool.log import until, write
from tests.pool.records import end, feedback, step
from tests.trainer.agents import RUN, group, submit
from tests.trainer.decisions.live_run import running_decider, verdicts

pytestmark = pytest.mark.broker


def ends(records: Sequence[Record], **fields: Any) -> list[Record]:
    """The same, with other Ends."""
    return [
        msgspec.structs.replace(record, **fields) if isinstance(record, TrajectoryEnd) else record
        for record in records
    ]


def register(log: Connection, uid: str, prompt: str, begins: Position) -> None:
    async def send() -> None:
        record = Registration(trajectory_uid=uid, prompt_uid=prompt, run=RUN, begins=begins)
        async with Producer(log, log.codec()) as producer:
            await producer.send(TRAJECTORIES, uid, record)

    asyncio.run(send())


@pytest.fixture(scope="module")
def log(kafka: local_kafka.Broker) -> Connection:
    """Two versions are made of six groups; of the others every one has another fate."""
    log = Connection(bootstrap=kafka.bootstrap, topic_prefix="test-lineage.")
    topics.create(log, partitions=3)
    scored = [Reward(name="match", version="2", value=1.0)]
    submit(log, ends(group("a"), rewards=scored))
    submit(log, group("b"))
    submit(log, ends(group("few"), status="failed", reason="no room"))
    submit(log, ends(group("val"), channel="val"))
    with running_decider(log, max_age=0) as run:
        run.open(0)
        run.next_batch(1)
        run.open(1)
        submit(log, group("c", version=1))
        submit(log, group("d", version=1))
        submit(log, group("old", version=0))
        run.next_batch(2)
        _until_decided(log, "old-0", "few-0", "val-0")
    # Only now, since a running decider would soon find it stale.
    submit(log, group("half", size=4)[:6])
    write(log, STEPS, group("unscored"))
    (began,) = write(log, STEPS, group("begun")[:1])
    register(log, "begun-0", "begun", began)
    return log


def _until_decided(log: Connection, *uids: str) -> None:
    until(lambda: set(uids) <= verdicts(log).keys(), lambda: time.sleep(0.1))


def told(log: Connection, uid: str, **fields: Any) -> dict[str, Any]:
    given = log.model_dump(exclude_none=True) | {"trajectory": uid, "json_": True} | fields
    said: list[str] = []
    lineage(LineageSettings.model_validate(given), said.append)
    found: dict[str, Any] = json.loads(said[0])
    return found


def test_of_a_trained_one_it_names_version_group_rewards_and_places(log: Connection) -> None:
    found = told(log, "a-1")
    (fate,) = found["fates"]
    assert (fate["run"], fate["verdict"], fate["version"]) == (RUN, "train", 1)
    assert fate["group"] == [f"a-{n}" for n in range(4)]
    assert found["status"] == "completed"
    assert found["prompt_uid"] == "a"
    assert found["sampled_by"].keys() == {"1.0"}
    assert found["rewards"][REWARDED]["reward"] == 1.0
    assert found["rewards"][REWARDED]["rewards"][0]["name"] == "match"
    places = found["records"]
    assert places[STEPS]["partition"] == places[REWARDED]["partition"]
    assert len(places[STEPS]["offsets"]) == len(places[REWARDED]["offsets"]) == 2


@pytest.mark.parametrize(
    ("uid", "verdict", "reason"),
    [
        ("old-0", "stale", "1 versions old"),
        ("few-2", "invalid", "failed: no room"),
        ("val-1", "other_channel", "its channel is val"),
        ("half-0", "waiting", ""),
        ("unscored-0", "waiting", "rewarded has no End"),
        ("begun-0", "waiting", "rewarded has no End"),
    ],
)
def test_of_others_it_says_why_not(log: Connection, uid: str, verdict: str, reason: str) -> None:
    (fate,) = told(log, uid)["fates"]
    assert fate["verdict"] == verdict
    assert reason in fate["reason"]
    assert fate["version"] is None


def test_one_that_was_only_begun_is_found_by_its_registration(log: Connection) -> None:
    found = told(log, "begun-0")
    assert found["status"] is None
    assert found["prompt_uid"] == "begun"
    assert len(found["records"][STEPS]["offsets"]) == 1


def test_late_feedback_is_the_reward_that_counts(log: Connection) -> None:
    write(log, REWARDED, [feedback(0.25, "b-0", "b")])
    assert told(log, "b-0")["rewards"][REWARDED]["reward"] == 0.25


def test_rewards_of_steps_count_as_their_sum(log: Connection) -> None:
    rated = [step("n-0", "n", "n", reward=0.5), end("n", "n"), feedback(2.0, "n", "n")]
    late = [feedback(0.75, "m", "m", step_id="m-0"), feedback(0.5, "m", "m", step_id="m-1")]
    two = [step("m-0", "m", "m"), step("m-1", "m", "m", index=1), end("m", "m", steps=2)]
    write(log, REWARDED, [*rated, *two, *late])
    rewards = [told(log, uid)["rewards"][REWARDED]["reward"] for uid in ("n", "m")]
    assert rewards == [2.0, 1.25]


def test_the_command_speaks_in_sentences(
    log: Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    reach = ["--bootstrap", log.bootstrap, "--topic-prefix", log.topic_prefix]
    assert cli.main(["replay", "lineage", "--trajectory", "c-0", "--run", RUN, *reach]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "trajectory c-0: completed, prompt c, channel train, run run"
    assert last.startswith("run run: trained version 2, in a group of 4 (Decision ")
    assert cli.main(["replay", "lineage", "--trajectory", "nobody", *reach]) == 1
    sentence = "steplog: The log has no trajectory nobody, and no Decision names it.\n"
    assert capsys.readouterr().err == sentence


def test_what_is_not_there_is_one_sentence(log: Connection) -> None:
    with pytest.raises(Fatal, match="no Decision of run other; runs with Decisions: run"):
        told(log, "a-1", run="other")
    with pytest.raises(Fatal, match="no trajectory unscored-0 of prompt a"):
        told(log, "unscored-0", prompt="a")


@pytest.fixture(scope="module")
def posted(kafka: local_kafka.Broker) -> Connection:
    """Two groups that were posted, of which one makes a version, and one waits."""
    log = Connection(bootstrap=kafka.bootstrap, topic_prefix="test-lineage-posted.")
    topics.create(log, partitions=3)
    write(log, REWARDED, [scored("first")])
    with running_decider(log, groups_per_batch=1) as run:
        run.open(0)
        run.next_batch(1)
    write(log, REWARDED, [scored("second")])
    return log


def scored(uid: str) -> ScoredGroup:
    ids, mask = pack_ids((11, 12, 13)), pack_ids((-100, 12, 13))
    return ScoredGroup(
        group_uid=uid,
        prompt_uid=f"prompt of {uid}",
        run=RUN,
        sequence=1,
        tokens=[ids, ids],
        masks=[mask, mask],
        scores=[0.0, 1.0],
        inference_logprobs=[np.array((1.0, -0.5, -0.25)).tobytes()] * 2,
    )


def test_a_posted_group_is_found_by_its_uid(posted: Connection) -> None:
    found = told(posted, "first")
    assert found["group_uid"] == "first"
    each = found["trajectories"]
    assert [one["trajectory_uid"] for one in each] == ["first/0", "first/1"]
    assert [one["rewards"][REWARDED]["reward"] for one in each] == [0.0, 1.0]
    (fate,) = each[1]["fates"]
    assert (fate["verdict"], fate["version"], fate["group"]) == ("train", 1, ["first/0", "first/1"])


def test_a_sequence_of_it_is_a_trajectory(posted: Connection) -> None:
    found = told(posted, "first/1")
    assert found["prompt_uid"] == "prompt of first"
    assert found["sampled_by"] == {"unknown": 2}
    assert found["records"] == {REWARDED: {"partition": ANY, "offsets": [ANY]}}
    assert [fate["version"] for fate in found["fates"]] == [1]
    (fate,) = told(posted, "second/0")["fates"]
    assert fate["verdict"] == "waiting"
    with pytest.raises(Fatal, match="no trajectory first/2"):
        told(posted, "first/2")
