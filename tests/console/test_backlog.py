"""Open trajectories, groups and ages, from registrations, Decisions and marks."""

from typing import Any, Literal

import pytest

from console.backlog import Backlog
from console.snapshot import RunBacklog
from schemas import DecidedGroup, Decision, Member, PolicyVersion, Position, Registration


@pytest.fixture
def backlog() -> Backlog:
    found = Backlog()
    found.finish_first_reading()
    return found


def register(backlog: Backlog, uid: str, prompt: str = "p", **fields: Any) -> None:
    written_at = fields.pop("written_at", 0)
    begins = Position(partition=0, offset=fields.pop("begins", 0))
    told = {"run": "run", "group_size": 2, **fields}
    backlog.register(
        Registration(trajectory_uid=uid, prompt_uid=prompt, begins=begins, **told), written_at
    )


def close(backlog: Backlog, uid: str, prompt: str = "p", **fields: Any) -> None:
    register(backlog, uid, prompt, **{"status": "completed", **fields})


def decide(
    backlog: Backlog, *uids: str, prompt: str = "p", closed_at: int = 100, run: str = "run"
) -> None:
    members = [Member(trajectory_uid=uid, verdict="train") for uid in uids]
    group = DecidedGroup(
        prompt_uid=prompt,
        partition=0,
        first_offset=0,
        closed_at=closed_at,
        verdict="train",
        members=members,
    )
    backlog.decide(Decision(run=run, incarnation=1, sequence=1, groups=[group]))


def publish(backlog: Backlog, version: int, mark: int) -> None:
    phases: tuple[Literal["opened", "live"], ...] = ("opened", "live")
    for phase in phases:
        backlog.add_version(
            PolicyVersion(
                run="run",
                incarnation=1,
                version=version,
                phase=phase,
                steps_marks=[mark],
                rewarded_marks=[mark],
            )
        )


def only(backlog: Backlog) -> RunBacklog:
    (found,) = backlog.runs()
    return found


def counts(backlog: Backlog) -> tuple[int, int, int]:
    found = only(backlog)
    return found.open_trajectories, found.groups_running, found.groups_waiting


def test_nothing_was_written() -> None:
    assert Backlog().runs() == []


def test_a_group_runs_until_all_its_trajectories_have_ended(backlog: Backlog) -> None:
    register(backlog, "a")
    assert counts(backlog) == (1, 1, 0)
    close(backlog, "a")
    assert counts(backlog) == (0, 1, 0), "one is still to come"
    register(backlog, "b")
    close(backlog, "b")
    assert counts(backlog) == (0, 0, 1)


def test_a_decision_takes_the_group_away(backlog: Backlog) -> None:
    for uid in "ab":
        register(backlog, uid)
        close(backlog, uid)
    decide(backlog, "a", "b")
    assert backlog.runs() == []


def test_another_runs_decision_leaves_the_group_waiting(backlog: Backlog) -> None:
    for uid in ("a", "b"):
        register(backlog, uid)
        close(backlog, uid)
    before = backlog.runs()
    decide(backlog, "a", "b", run="other")
    assert backlog.runs() == before


def test_a_member_that_was_of_no_use_leaves_with_its_group(backlog: Backlog) -> None:
    for uid in "abc":
        register(backlog, uid)
    close(backlog, "a")
    close(backlog, "b")
    close(backlog, "c", status="failed")
    decide(backlog, "a", "b")
    assert backlog.runs() == []


def test_the_next_group_of_a_prompt_is_not_decided_with_the_last(backlog: Backlog) -> None:
    register(backlog, "next", begins=200)
    close(backlog, "next", begins=200)
    decide(backlog, "a", "b", closed_at=100)
    assert counts(backlog) == (0, 1, 0)


def test_a_late_closing_does_not_bring_a_decided_trajectory_back(backlog: Backlog) -> None:
    register(backlog, "a")
    decide(backlog, "a")
    close(backlog, "a")
    assert backlog.runs() == []


def test_at_first_a_closing_may_be_all_that_compaction_left() -> None:
    backlog = Backlog()
    close(backlog, "a")
    close(backlog, "b")
    assert counts(backlog) == (0, 0, 1)


def test_other_channels_have_trajectories_and_no_groups(backlog: Backlog) -> None:
    register(backlog, "a", channel="val")
    assert counts(backlog) == (1, 0, 0)
    close(backlog, "a", channel="val")
    assert backlog.runs() == []


def test_a_trajectory_may_change_its_prompt_before_the_first_call(backlog: Backlog) -> None:
    register(backlog, "a", "p")
    register(backlog, "a", "q")
    assert counts(backlog) == (1, 1, 0)


def test_the_oldest_age_is_counted_in_versions(backlog: Backlog) -> None:
    for version, mark in ((0, 0), (1, 10), (2, 20)):
        publish(backlog, version, mark)
    register(backlog, "new", begins=25)
    assert only(backlog).oldest_versions == 0
    register(backlog, "old", begins=12)
    assert only(backlog).oldest_versions == 1
    decide(backlog, "old")
    assert only(backlog).oldest_versions == 0


def test_without_trajectories_nothing_is_old(backlog: Backlog) -> None:
    publish(backlog, 4, 0)
    assert (only(backlog).version, only(backlog).oldest_versions) == (4, None)


def test_runs_are_apart(backlog: Backlog) -> None:
    register(backlog, "a", run="one")
    register(backlog, "b", "q", run="two")
    assert [(one.run, one.open_trajectories) for one in backlog.runs()] == [("one", 1), ("two", 1)]


def test_what_the_topic_no_longer_holds_is_forgotten(backlog: Backlog) -> None:
    register(backlog, "a", written_at=1000)
    register(backlog, "b", "q", written_at=2000)
    assert backlog.oldest_written() == 1000
    backlog.forget_before(1500)
    assert counts(backlog) == (1, 1, 0)
    assert backlog.oldest_written() == 2000
