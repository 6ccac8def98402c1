"""`steplog lag` against a real broker."""

import json
import subprocess
from typing import Any

import pytest

from pool import topics
from pool.connection import Connection
from pool.core.bookmark import Bookmark, add_mark
from pool.topics import POLICY, REWARDED, STEPS, TRAJECTORIES
from schemas import PolicyVersion, Position, Registration
from tests import processes
from tests.console.consumer_groups import commit, member
from tests.pool.log import write
from tests.steplog.command import STEPLOG, reaching, steplog
from tests.trainer.agents import RUN, submit_groups

pytestmark = pytest.mark.broker


@pytest.fixture
def log(connection: Connection) -> Connection:
    """Two partitions, and four groups in them: 32 records of `steps`."""
    topics.create(connection, partitions=2)
    submit_groups(connection, ["a", "b", "c", "d"])
    return connection


@pytest.fixture
def group(log: Connection) -> str:
    return f"{log.topic_prefix}group"


def snapshot(connection: Connection, *options: str) -> dict[str, Any]:
    told = steplog("lag", "--json", *options, *reaching(connection))
    assert told.returncode == 0, told.stderr
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def test_lag_counts_what_was_not_processed(log: Connection, group: str) -> None:
    commit(log, group, STEPS, {0: (3, ""), 1: (0, "")})
    found = snapshot(log, "--no-work")
    (told,) = found["groups"]
    assert (told["group"], told["topic"]) == (group, log.topic_name(STEPS))
    assert told["lag"] == 32 - 3
    assert told["members"] == 0
    assert 0 < told["lag_seconds"] < 600, "they were written a moment ago"
    assert found["runs"] == []
    assert sum(t["end"] for t in found["topics"] if t["topic"] == log.topic_name(STEPS)) == 32


def test_a_group_that_has_read_all_is_not_behind(log: Connection, group: str) -> None:
    ends = {t["partition"]: t["end"] for t in snapshot(log)["topics"] if t["topic"].endswith(STEPS)}
    commit(log, group, STEPS, {number: (end, "") for number, end in ends.items()})
    (told,) = snapshot(log)["groups"]
    assert (told["lag"], told["lag_seconds"]) == (0, 0)


def test_the_rebuild_offset_is_the_bookmark_of_the_commit(log: Connection, group: str) -> None:
    commit(log, group, STEPS, {0: (4, add_mark(Bookmark(2).encode()))})
    (told,) = snapshot(log, "--no-work")["groups"]
    first, second = told["partitions"]
    assert (first["committed"], first["rebuild"]) == (4, 2)
    assert (second["committed"], second["rebuild"]) == (None, None)


def test_two_groups_may_stand_at_two_places_of_a_partition(log: Connection, group: str) -> None:
    commit(log, group, STEPS, {0: (1, ""), 1: (1, "")})
    commit(log, group + "-2", STEPS, {0: (2, ""), 1: (2, "")})
    lags = {told["group"]: told for told in snapshot(log)["groups"]}
    assert [lags[name]["lag"] for name in (group, group + "-2")] == [30, 28]
    assert all(one["lag_seconds"] > 0 for told in lags.values() for one in told["partitions"])


def test_members_count_before_they_have_committed(log: Connection, group: str) -> None:
    with member(log, group, REWARDED):
        (told,) = snapshot(log, "--no-work")["groups"]
    assert (told["members"], told["lag"], told["partitions"][0]["committed"]) == (1, 32, None)


def test_groups_of_other_topics_are_not_ours(log: Connection, group: str) -> None:
    other = log.model_copy(update={"topic_prefix": f"{log.topic_prefix}other."})
    topics.create(other, partitions=1)
    commit(other, group, STEPS, {0: (0, "")})
    assert snapshot(log, "--no-work")["groups"] == []


def test_work_is_counted_from_the_log(log: Connection) -> None:
    begins = Position(partition=0, offset=0)
    for phase in ("opened", "live"):
        version = PolicyVersion(
            run=RUN, incarnation=1, version=7, phase=phase, steps_marks=[0, 0], rewarded_marks=[0, 0]
        )  # fmt: skip
        write(log, POLICY, [version])
    named: dict[str, Any] = {"prompt_uid": "a", "run": RUN, "begins": begins, "group_size": 2}
    write(log, TRAJECTORIES, [Registration(trajectory_uid="t", **named)])
    (run,) = snapshot(log)["runs"]
    assert run == {
        "run": RUN, "version": 7, "incarnation": 1, "open_trajectories": 1,
        "groups_running": 1, "groups_waiting": 0, "oldest_versions": 0,
    }  # fmt: skip


def test_the_table_fits_80_columns(log: Connection, group: str) -> None:
    commit(log, group, STEPS, {0: (3, "")})
    told = steplog("lag", *reaching(log), COLUMNS="80")
    assert told.returncode == 0, told.stderr
    assert f"{group} reads {log.topic_name(STEPS)}   0 members   lag 29" in told.stdout
    assert max(map(len, told.stdout.splitlines())) <= 80


def test_watching_goes_on_until_it_is_stopped(log: Connection) -> None:
    command = [STEPLOG, "lag", "--watch", "--json", "--every-s", "0.1", *reaching(log)]
    with processes.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            times = [json.loads(process.stdout.readline())["at"] for _ in range(3)]
            process.terminate()
            assert process.wait(30) == 143
        finally:
            process.kill()
    assert times == sorted(times)


def test_no_topics_is_one_sentence(connection: Connection) -> None:
    told = steplog("lag", *reaching(connection))
    assert told.returncode == 1
    assert told.stderr.count("\n") == 1
    assert "does not exist" in told.stderr
