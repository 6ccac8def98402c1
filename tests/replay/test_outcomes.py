"""Why a trajectory is not trained, where no Decision names it."""

from typing import Any

import pytest

from replay.lineage.outcomes import TrajectoryOutcome, find_outcomes
from schemas import DecidedGroup, Decision, Member, PartitionOffsets, SkippedRange
from tests.pool.records import at, end, step

COPIES = [at(40, step("s")), at(41, end())]


def decision(sequence: int, **fields: Any) -> Decision:
    return Decision(run="run", incarnation=1, sequence=sequence, **fields)


def read_to(offset: int, sequence: int = 1, **fields: Any) -> Decision:
    offsets = [PartitionOffsets(partition=0, committed=offset, rebuild=offset)]
    return decision(sequence, offsets=offsets, **fields)


def group(verdict: Any, reason: str = "", members: Any = ()) -> DecidedGroup:
    made = [
        Member(trajectory_uid=uid, verdict=own, reason=why, offsets=[40, 41])
        for uid, own, why in members
    ]
    return DecidedGroup(
        prompt_uid="p",
        partition=0,
        first_offset=1,
        closed_at=2,
        verdict=verdict,
        reason=reason,
        members=made,
    )


def only(*decisions: Decision, copies: Any = tuple(COPIES)) -> TrajectoryOutcome:
    (outcome,) = find_outcomes("run", decisions, "t", copies)
    return outcome


def test_without_a_verdict_offsets_tell_what_it_waits_for() -> None:
    assert "has made no Decision" in only().reason
    assert "up to offset 30, and its End is at 41" in only(read_to(30)).reason
    assert "not decided its group" in only(read_to(30), read_to(50, 2)).reason
    assert "rewarded has no End" in only(read_to(50), copies=COPIES[:1]).reason


@pytest.mark.parametrize(("first", "verdict"), [(30, "passed_over"), (42, "waiting")])
def test_a_range_that_was_passed_over_may_hold_it(first: int, verdict: str) -> None:
    skipped = [
        SkippedRange(partition=0, first=first, end=60),
        SkippedRange(partition=1, first=0, end=60),
    ]
    outcome = only(read_to(60, skipped=skipped))
    assert outcome.verdict == verdict
    assert (f"{first} to 60 unread" in outcome.reason) == (verdict == "passed_over")


def test_a_member_shares_its_groups_fate_unless_it_has_its_own() -> None:
    members = [("t", "train", ""), ("u", "invalid", "failed")]
    few = decision(3, groups=[group("too_few", "1 of 2 are usable", members)])
    assert only(few).sentence() == ("run run: not trained, too_few: 1 of 2 are usable (Decision 3)")
    (other,) = find_outcomes("run", [few], "u", COPIES)
    assert (other.verdict, other.reason) == ("invalid", "failed")


@pytest.mark.parametrize("verdict", ["lost", "given_up"])
def test_what_was_decided_and_then_withdrawn_was_not_trained(verdict: Any) -> None:
    members = [("t", "train", ""), ("u", "train", "")]
    first = decision(1, version=1, groups=[group("train", "", members)])
    outcome = only(first)
    assert (outcome.version, outcome.group) == (1, ["t", "u"])
    withdrawn = decision(2, groups=[group(verdict, "the reason", members)])
    outcome = only(first, withdrawn)
    assert (outcome.verdict, outcome.reason, outcome.version) == (verdict, "the reason", None)
