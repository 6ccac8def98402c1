"""`steplog topics`: what a person reads, and what a script gets as exit status."""

import json

import pytest

from pool import topics
from pool.connection import Connection
from pool.topics import TOPICS
from tests.conftest import free_port
from tests.steplog.command import reaching, steplog

pytestmark = pytest.mark.broker


def test_topics_are_created_checked_and_listed(connection: Connection) -> None:
    where = reaching(connection)
    before = steplog("topics", "check", *where)
    assert (before.returncode, before.stdout) == (1, "")
    names = [connection.topic_name(name) for name in TOPICS]
    needed = [connection.topic_name(name) for name, topic in TOPICS.items() if not topic.optional]
    assert before.stderr == (
        f"steplog: {', '.join(needed)} not found at {connection.bootstrap}; create missing topics"
        " with `steplog topics create`\n"
    )

    fits = f"All topics exist and match at {connection.bootstrap}."
    made = steplog("topics", "create", "--partitions", "3", *where)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.splitlines() == [*(f"created {name}" for name in names), fits]
    again = steplog("topics", "create", "--partitions", "4", *where)
    assert (again.returncode, again.stdout) == (0, f"{fits}\n")

    after = steplog("topics", "check", *where)
    assert (after.returncode, after.stdout, after.stderr) == (0, f"{fits}\n", "")
    assert topics.check(connection)["steps"].partitions == 3


def test_the_list_is_a_table_or_json_lines(connection: Connection) -> None:
    topics.create(connection, partitions=3)
    table = steplog("topics", "list", *reaching(connection))
    assert (table.returncode, table.stderr) == (0, "")
    rows = [line.split(maxsplit=4) for line in table.stdout.splitlines()]
    assert rows[0] == ["topic", "partitions", "replication", "cleanup", "records"]
    steps = "Step, TrajectoryEnd, Feedback, StepNote"
    assert rows[1] == [connection.topic_name("steps"), "3", "1", "delete", steps]
    dead = [connection.topic_name("dead-letters"), "3", "1", "delete", "any"]
    assert rows[7:] == [dead]

    listed = steplog("topics", "list", "--json", *reaching(connection))
    found = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [row["topic"] for row in found] == [connection.topic_name(name) for name in TOPICS]
    assert found[0] == {
        "topic": connection.topic_name("steps"),
        "partitions": 3,
        "replication": 1,
        "cleanup": "delete",
        "records": ["Step", "TrajectoryEnd", "Feedback", "StepNote"],
    }


def test_the_list_shows_what_is_missing(connection: Connection) -> None:
    table = steplog("topics", "list", *reaching(connection))
    assert table.returncode == 0
    assert all(" missing " in line for line in table.stdout.splitlines()[1:])
    listed = steplog("topics", "list", "--json", *reaching(connection))
    found = [json.loads(line) for line in listed.stdout.splitlines()]
    assert {row["partitions"] for row in found} == {None}
    assert len(found) == len(TOPICS)


@pytest.mark.slow
def test_a_broker_that_is_not_there_is_one_sentence() -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    done = steplog("topics", "check", "--bootstrap", nowhere)
    assert (done.returncode, done.stdout) == (1, "")
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"steplog: no broker answers at {nowhere}: ")


def test_partitions_must_be_a_count() -> None:
    done = steplog("topics", "create", "--partitions", "0")
    assert done.returncode == 2
    assert done.stderr.startswith("steplog: --partitions cannot be used: ")
