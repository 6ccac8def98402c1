"""How many groups run or wait, as a fold of `trajectories` and `ledger`."""

import itertools
import json
from typing import Any

import msgspec
import pytest

from gateway.state.admission import Admission
from pool.core.shares import EnvironmentShare, read_share
from schemas import (
    DecidedGroup,
    Decision,
    Member,
    PolicyVersion,
    Position,
    Record,
    Registration,
)

COUNT = itertools.count(1)


def registered(uid: str, prompt: str = "p", **fields: Any) -> Registration:
    begins = Position(partition=0, offset=0)
    return Registration(trajectory_uid=uid, prompt_uid=prompt, run="r", begins=begins, **fields)


def closed(uid: str, prompt: str = "p", status: Any = "completed", **fields: Any) -> Registration:
    return registered(uid, prompt, status=status, **fields)


def decided(*uids: str, prompt: str = "p", created_at: int = 0) -> Decision:
    members = [Member(trajectory_uid=uid, verdict="train") for uid in uids]
    group = DecidedGroup(
        prompt_uid=prompt,
        partition=0,
        first_offset=0,
        closed_at=0,
        verdict="train",
        members=members,
    )
    return Decision(
        run="r", incarnation=1, sequence=next(COUNT), groups=[group], created_at=created_at
    )


def left_over(*uids: str, created_at: int = 0) -> Decision:
    others = [Member(trajectory_uid=uid, verdict="late") for uid in uids]
    return Decision(
        run="r", incarnation=1, sequence=next(COUNT), others=others, created_at=created_at
    )


def fold(*records: Record, limit: int | None = 2, size: int = 2, share: float = 0.5) -> Admission:
    admission = Admission("r", limit, size, share)
    for record in records:
        admission.apply(record)
    return admission


@pytest.mark.parametrize(
    ("records", "count"),
    [
        ([], 0),
        ([registered("a")], 1),
        ([registered("a"), registered("a")], 1),
        ([registered("a"), registered("b")], 1),
        ([registered("a"), registered("b", "q")], 2),
        ([registered("a", channel="val")], 0),
        # It runs while members are missing, or not closed.
        ([registered("a"), closed("a")], 1),
        ([registered("a"), closed("a", status="failed")], 1),
        # It waits for its decision, if enough of it is usable.
        ([registered("a"), registered("b"), closed("a"), closed("b")], 1),
        (
            [
                *(registered(uid) for uid in "ab"),
                *(closed(uid, status="failed") for uid in "ab"),
            ],
            0,
        ),
        ([registered("a"), registered("b"), closed("a"), closed("b", status="cancelled")], 0),
        # A truncated one can be trained.
        ([registered("a"), registered("b"), closed("a"), closed("b", status="truncated")], 1),
        # Decided.
        ([registered("a"), registered("b"), closed("a"), closed("b"), decided("a", "b")], 0),
        ([registered("a"), registered("b"), decided("a", "b"), closed("a"), closed("b")], 0),
        ([registered("a"), registered("b"), closed("a"), decided("a"), closed("b")], 1),
        ([registered("a"), left_over("a")], 0),
        # Another run reads along.
        ([registered("a"), msgspec.structs.replace(decided("a"), run="other")], 1),
        ([msgspec.structs.replace(registered("a"), run="other")], 0),
        # The prompt comes back in the next epoch.
        ([registered("a"), decided("a"), registered("b")], 1),
        # Another prompt before the first call.
        ([registered("a"), registered("a", "q")], 1),
        # Another channel before, or after.
        ([registered("a"), registered("a", channel="val")], 0),
        ([registered("a", channel="val"), registered("a")], 1),
    ],
)
def test_groups_that_run_or_wait_are_counted(records: list[Record], count: int) -> None:
    assert fold(*records).groups_in_flight == count


def test_the_groups_own_size_counts() -> None:
    ended = [registered("a", group_size=1), closed("a", group_size=1, status="failed")]
    assert fold(*ended, size=8).groups_in_flight == 0
    assert fold(*ended[:1], registered("b", group_size=3), size=1).groups_in_flight == 1


def test_new_groups_are_admitted_up_to_the_limit_and_members_always() -> None:
    admission = fold(registered("a", "p"), registered("b", "q"))
    assert not admission.admits("new")
    assert admission.admits("p") and admission.admits("q")


def live(version: int) -> PolicyVersion:
    return PolicyVersion(run="r", incarnation=1, version=version, phase="live")


def test_groups_decided_ahead_keep_their_places_until_the_version_before_theirs_is_live() -> None:
    now = msgspec.structs.replace(decided("a"), version=6)
    ahead = msgspec.structs.replace(decided("b", prompt="q"), version=7)
    admission = fold(live(5), registered("a"), registered("b", "q"), now, ahead)
    assert admission.groups_in_flight == 1
    again = registered("c", "q")  # the prompt comes back before its first group is trained
    admission.apply(again)
    admission.apply(live(6))
    assert admission.groups_in_flight == 1 and admission.admits("new")
    # A restart may read the versions before the decisions, or after them.
    records = [registered("a"), registered("b", "q"), now, ahead, again]
    assert fold(*records, live(5), live(6)).groups_in_flight == 1
    assert fold(live(5), live(6), *records).groups_in_flight == 1


def test_a_decided_prompt_is_new_again() -> None:
    admission = fold(registered("a", "p"), decided("a"), registered("b", "q"), registered("c", "r"))
    assert not admission.admits("p")


def test_before_a_trainer_has_started_everything_is_admitted() -> None:
    admission = fold(*(registered(str(n), str(n)) for n in range(100)), limit=None)
    assert admission.admits("new")


def test_a_group_that_is_about_to_begin_is_counted_until_the_log_says_so() -> None:
    admission = fold(limit=1)
    admission.expect("a", "p")
    assert not admission.admits("q")
    assert admission.admits("p")
    admission.apply(registered("a", "p"))
    assert admission.groups_in_flight == 1
    admission.apply(decided("a"))
    assert admission.admits("q")


def test_a_group_that_did_not_begin_after_all_is_forgotten() -> None:
    admission = fold(limit=1)
    admission.expect("a", "p")
    admission.forget("a")
    assert admission.admits("q")


def started(groups_per_batch: int | None, run: str = "r") -> PolicyVersion:
    return PolicyVersion(
        run=run, incarnation=1, version=0, phase="started", groups_per_batch=groups_per_batch
    )


def test_three_batches_of_the_trainer_may_be_in_flight_unless_a_limit_is_set() -> None:
    waiting = [registered(str(n), str(n)) for n in range(6)]
    assert not fold(*waiting, started(2), limit=None).admits("new"), "those of before count too"
    assert fold(*waiting, started(3), limit=None).admits("new")
    assert fold(*waiting, started(2), limit=7).admits("new")
    assert fold(*waiting, started(2, run="other"), started(None), limit=None).admits("new")
    assert fold(*waiting, started(2), started(3), limit=None).admits("new"), "the newest holds"


def of(environment: str, weight: float = 1.0, minimum: float = 0.0) -> str:
    share = {"weight": weight, "minimum": minimum}
    return json.dumps({"environment": environment, "steplog_share": share})


def in_flight(metadata: str, count: int) -> list[Registration]:
    name = read_share(metadata).environment
    return [registered(f"{name}{n}", f"{name}{n}", metadata=metadata) for n in range(count)]


def test_an_environment_may_have_its_part_of_the_groups_in_flight() -> None:
    maths, code = of("math", 2.0), of("code", 1.0)
    admission = fold(*in_flight(maths, 5), *in_flight(code, 3), limit=9)
    assert admission.admits("new", read_share(maths)), "six of nine are its own"
    assert not admission.admits("new", read_share(code))
    admission.expect("m", "new", read_share(maths))
    assert not admission.admits("newer", read_share(maths)), "one is about to begin"


def test_alone_an_environment_has_all_places() -> None:
    admission = fold(*in_flight(of("math", 2.0), 8), limit=9)
    assert admission.admits("new", read_share(of("math", 2.0)))


def test_without_a_stated_share_environments_take_what_is_free() -> None:
    plain = [json.dumps({"environment": name}) for name in ("math", "code")]
    admission = fold(*in_flight(plain[0], 8), *in_flight(plain[1], 1), limit=10)
    assert admission.admits("new", read_share(plain[0]))


def test_a_minimum_is_kept_free_and_the_rest_is_divided_by_weight() -> None:
    code = of("code", minimum=0.5)
    admission = fold(*in_flight(of("math"), 2), *in_flight(code, 1), limit=8)
    limits = [admission.limit_of(read_share(one)) for one in (of("math"), code)]
    assert limits == [2, 6]
    assert not admission.admits("new", read_share(of("math")))


def test_an_environment_that_is_gone_gives_its_part_back() -> None:
    code, maths = of("code", minimum=0.5), of("math")
    admission = fold(*in_flight(code, 1), decided("code0", prompt="code0"), limit=2)
    assert admission.limit_of(read_share(maths)) == 1
    for one in in_flight(maths, 8):  # four times the limit
        admission.apply(one)
        admission.apply(decided(one.trajectory_uid, prompt=one.prompt_uid))
    assert admission.limit_of(read_share(maths)) == 2


@pytest.mark.parametrize(
    "metadata",
    ["{}", '{"environment": 7}', '{"steplog_share": 1}', '{"steplog_share": {"weight": -1}}'],
)
def test_metadata_may_be_anything(metadata: str) -> None:
    assert read_share(metadata) == EnvironmentShare()
