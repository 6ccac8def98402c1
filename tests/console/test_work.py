"""Open trajectories, groups and ages, from registrations, Decisions and marks."""

from typing import Any, Literal

import pytest

from console.look import RunWork
from console.work import Work
from schemas import DecidedGroup, Decision, Member, PolicyVersion, Position, Registration


@pytest.fixture
def work() -> Work:
    found = Work()
    found.everything_was_read()
    return found


def register(work: Work, uid: str, prompt: str = "p", **fields: Any) -> None:
    written_at = fields.pop("written_at", 0)
    begins = Position(partition=0, offset=fields.pop("begins", 0))
    told = {"run": "run", "group_size": 2, **fields}
    work.register(
        Registration(trajectory_uid=uid, prompt_uid=prompt, begins=begins, **told), written_at
    )


def close(work: Work, uid: str, prompt: str = "p", **fields: Any) -> None:
    register(work, uid, prompt, **{"status": "completed", **fields})


def decide(
    work: Work, *uids: str, prompt: str = "p", closed_at: int = 100, run: str = "run"
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
    work.decide(Decision(run=run, incarnation=1, sequence=1, groups=[group]))


def publish(work: Work, version: int, mark: int) -> None:
    phases: tuple[Literal["opened", "live"], ...] = ("opened", "live")
    for phase in phases:
        work.open(
            PolicyVersion(
                run="run",
                incarnation=1,
                version=version,
                phase=phase,
                steps_marks=[mark],
                rewarded_marks=[mark],
            )
        )


def only(work: Work) -> RunWork:
    (found,) = work.runs()
    return found


def counts(work: Work) -> tuple[int, int, int]:
    found = only(work)
    return found.open_trajectories, found.groups_running, found.groups_waiting


def test_nothing_was_written() -> None:
    assert Work().runs() == []


def test_a_group_runs_until_all_its_trajectories_have_ended(work: Work) -> None:
    register(work, "a")
    assert counts(work) == (1, 1, 0)
    close(work, "a")
    assert counts(work) == (0, 1, 0), "one is still to come"
    register(work, "b")
    close(work, "b")
    assert counts(work) == (0, 0, 1)


def test_a_decision_takes_the_group_away(work: Work) -> None:
    for uid in "ab":
        register(work, uid)
        close(work, uid)
    decide(work, "a", "b")
    assert work.runs() == []


def test_another_runs_decision_leaves_the_group_waiting(work: Work) -> None:
    for uid in ("a", "b"):
        register(work, uid)
        close(work, uid)
    before = work.runs()
    decide(work, "a", "b", run="other")
    assert work.runs() == before


def test_a_member_that_was_of_no_use_leaves_with_its_group(work: Work) -> None:
    for uid in "abc":
        register(work, uid)
    close(work, "a")
    close(work, "b")
    close(work, "c", status="failed")
    decide(work, "a", "b")
    assert work.runs() == []


def test_the_next_group_of_a_prompt_is_not_decided_with_the_last(work: Work) -> None:
    register(work, "next", begins=200)
    close(work, "next", begins=200)
    decide(work, "a", "b", closed_at=100)
    assert counts(work) == (0, 1, 0)


def test_a_late_closing_does_not_bring_a_decided_trajectory_back(work: Work) -> None:
    register(work, "a")
    decide(work, "a")
    close(work, "a")
    assert work.runs() == []


def test_at_first_a_closing_may_be_all_that_compaction_left() -> None:
    work = Work()
    close(work, "a")
    close(work, "b")
    assert counts(work) == (0, 0, 1)


def test_other_channels_have_trajectories_and_no_groups(work: Work) -> None:
    register(work, "a", channel="val")
    assert counts(work) == (1, 0, 0)
    close(work, "a", channel="val")
    assert work.runs() == []


def test_a_trajectory_may_change_its_prompt_before_the_first_call(work: Work) -> None:
    register(work, "a", "p")
    register(work, "a", "q")
    assert counts(work) == (1, 1, 0)


def test_the_oldest_age_is_counted_in_versions(work: Work) -> None:
    for version, mark in ((0, 0), (1, 10), (2, 20)):
        publish(work, version, mark)
    register(work, "new", begins=25)
    assert only(work).oldest_versions == 0
    register(work, "old", begins=12)
    assert only(work).oldest_versions == 1
    decide(work, "old")
    assert only(work).oldest_versions == 0


def test_without_trajectories_nothing_is_old(work: Work) -> None:
    publish(work, 4, 0)
    assert (only(work).version, only(work).oldest_versions) == (4, None)


def test_runs_are_apart(work: Work) -> None:
    register(work, "a", run="one")
    register(work, "b", "q", run="two")
    assert [(one.run, one.open_trajectories) for one in work.runs()] == [("one", 1), ("two", 1)]


def test_what_the_topic_no_longer_holds_is_forgotten(work: Work) -> None:
    register(work, "a", written_at=1000)
    register(work, "b", "q", written_at=2000)
    assert work.oldest_written() == 1000
    work.forget_before(1500)
    assert counts(work) == (1, 1, 0)
    assert work.oldest_written() == 2000
