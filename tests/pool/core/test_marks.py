from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.core.groups import TRAIN
from pool.core.marks import Age, PolicyMarks, UnknownAge
from pool.core.trajectories import Trajectory, TrajectoryAssembler
from schemas import PolicyVersion, Position
from tests.pool.records import RUN, copied, end, feed, sampled, step, trajectory_of

NOBODY = frozenset[str]()


def opened(version: int, *steps_marks: int, **fields: Any) -> PolicyVersion:
    return PolicyVersion(
        **{
            "run": RUN,
            "incarnation": 1,
            "version": version,
            "phase": "opened",
            "steps_marks": list(steps_marks),
            **fields,
        }
    )


def made(offset: int, *versions: int, partition: int = 0, **fields: Any) -> Trajectory:
    """A trajectory whose only Step lies at `offset` of `steps` and was sampled by these versions."""
    segments = [sampled(version, first_token) for first_token, version in enumerate(versions)]
    only = step("s", segments=segments, **fields)
    return trajectory_of(only, end(**fields), first=offset, partition=partition)


def at(offset: int, partition: int = 0) -> Position:
    return Position(partition=partition, offset=offset)


MARKS = PolicyMarks(RUN, [opened(0, 0, 0), opened(1, 10, 5), opened(2, 20, 5), opened(3, 30, 50)])


@pytest.mark.parametrize(
    ("offset", "version"), [(0, 0), (9, 0), (10, 1), (19, 1), (20, 2), (30, 3), (1000, 3)]
)
def test_the_version_by_offset_is_the_newest_whose_mark_lies_at_or_before_it(
    offset: int, version: int
) -> None:
    assert MARKS.version_at(at(offset)) == version


def test_marks_are_those_of_the_records_own_partition() -> None:
    assert MARKS.version_at(at(4, partition=1)) == 0
    assert MARKS.version_at(at(5, partition=1)) == 2  # two versions opened, and nothing was written
    assert MARKS.version_at(at(50, partition=1)) == 3


def test_before_the_first_mark_there_is_no_version() -> None:
    marks = PolicyMarks(RUN, [opened(0, 7)])
    assert marks.version_at(at(6)) is None
    with pytest.raises(UnknownAge):
        marks.age(made(6, 0), 0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8).map(sorted), st.integers(0, 60))
def test_the_generating_version_is_never_newer_than_the_version_by_offset(
    marks: list[int], offset: int
) -> None:
    """Whatever was open when a record was written is open at its offset: a record at `offset` was
    written after every version whose mark, the end of the partition, was at most `offset`."""
    policy = PolicyMarks(RUN, [opened(version, mark) for version, mark in enumerate(marks)])
    could_exist = [version for version, mark in enumerate(marks) if mark <= offset]
    assert policy.version_at(at(offset)) == max(could_exist, default=None)


def test_the_age_splits_into_queue_age_and_in_flight_age() -> None:
    # At offset 25 version 2 was open. Version 1 sampled it, and version 3 is the newest now.
    age = MARKS.age(made(25, 1), 3)
    assert age == Age(queue=1, in_flight=1)
    assert age.total == 2


def test_the_oldest_segment_counts() -> None:
    assert MARKS.age(made(25, 0, 1, 2), 3) == Age(queue=1, in_flight=2)


def test_the_oldest_keys_and_values_count() -> None:
    kept = msgspec.structs.replace(sampled(2), kv_version=1)
    trajectory = trajectory_of(step("s", segments=[kept]), end(), first=25)
    assert MARKS.age(trajectory, 3) == Age(1, 1)


def test_the_oldest_step_of_a_trajectory_counts() -> None:
    old = step("old", segments=[sampled(0)])
    new = step("new", index=1, segments=[sampled(1)])
    whole = trajectory_of(old, new, end(steps=2), first=9)  # version 1 opened between them
    assert MARKS.age(whole, 3) == Age(queue=3, in_flight=0)


def test_the_place_in_steps_counts_for_what_is_read_from_rewarded() -> None:
    copies = [copied(500, step("s", segments=[sampled(1)]), 15), copied(501, end(), 16)]
    [whole] = feed(TrajectoryAssembler(), copies)
    assert isinstance(whole, Trajectory)
    assert MARKS.age(whole, 3) == Age(queue=2, in_flight=0)


def test_when_a_version_is_opened_twice_its_earliest_mark_counts() -> None:
    marks = PolicyMarks(RUN, [opened(0, 0), opened(1, 10), opened(2, 20)])
    marks.add(opened(1, 30, incarnation=2))
    marks.add(opened(2, 40, incarnation=2))
    marks.add(opened(3, 50, incarnation=2))
    assert [marks.version_at(at(offset)) for offset in (10, 20, 30, 40, 50)] == [1, 2, 2, 2, 3]
    assert marks.opened == 3


def test_the_incarnation_is_the_highest_that_was_seen_in_any_phase() -> None:
    marks = PolicyMarks(RUN, [opened(0, 0)])
    marks.add(opened(0, phase="started", incarnation=5))
    marks.add(opened(0, phase="live", incarnation=4))
    assert marks.incarnation == 5


def test_only_live_records_make_a_version_live() -> None:
    marks = PolicyMarks(RUN, [opened(0, 0), opened(1, 10)])
    assert (marks.opened, marks.live) == (1, None)
    marks.add(opened(0, phase="live"))
    assert [marks.opened, marks.live] == [1, 0]


def test_a_version_is_opened_or_not() -> None:
    assert MARKS.is_opened(3)
    assert not MARKS.is_opened(4)


def test_a_step_that_claims_a_version_not_open_at_its_offset_is_invalid() -> None:
    with pytest.raises(UnknownAge, match="claims a version newer than 1, the newest that was open"):
        MARKS.age(made(19, 2), 3)
    assert MARKS.judge(made(19, 1, 2), 3, 10, NOBODY).verdict == "invalid"


def test_a_step_that_does_not_say_who_sampled_it_is_invalid() -> None:
    judgement = MARKS.judge(made(25), 3, 10, NOBODY)
    assert judgement == ("invalid", "step s does not say which version sampled it")


def test_no_older_than_the_largest_age_may_train() -> None:
    assert MARKS.judge(made(25, 1), 3, 2, NOBODY) == TRAIN
    assert MARKS.judge(made(25, 1), 3, 1, NOBODY) == (
        "stale",
        "2 versions old (1 in the queue, 1 in flight), 1 are allowed",
    )


def test_marks_of_another_run_do_not_count() -> None:
    marks = PolicyMarks(RUN, [opened(0, 0)])
    marks.add(opened(9, 0, run="other", incarnation=9))
    assert (marks.opened, marks.incarnation) == (0, 1)


def test_trajectories_of_another_run_are_refused() -> None:
    judgement = MARKS.judge(made(25, 2, run="other"), 3, 10, NOBODY)
    assert judgement == ("invalid", "it belongs to run other, not run")


def test_trajectories_of_an_accepted_run_are_of_unknown_age_and_train() -> None:
    other = made(25, 99, run="other")
    assert MARKS.judge(other, 3, 0, frozenset({"other"})) == TRAIN
    with pytest.raises(UnknownAge):
        MARKS.age(other, 3)


def test_a_trajectory_with_a_step_of_another_run_is_refused() -> None:
    """It was begun before this run: versions of two runs cannot be compared."""
    before = step("s", run="before", segments=[sampled(0)])
    whole = trajectory_of(before, end(), first=25)
    assert MARKS.judge(whole, 3, 10, NOBODY).verdict == "invalid"
    assert MARKS.judge(whole, 3, 10, frozenset({"before"})) == TRAIN


def test_accepting_the_own_run_does_not_make_its_stale_trajectories_fresh() -> None:
    assert MARKS.judge(made(25, 1), 3, 1, frozenset({RUN})).verdict == "stale"


def test_what_lies_in_rewarded_below_the_mark_of_a_version_is_older_for_certain() -> None:
    marks = PolicyMarks(
        RUN,
        [
            opened(0, 0, 0, rewarded_marks=[0, 0]),
            opened(1, 10, 10, rewarded_marks=[8, 3]),
            opened(3, 30, 30, rewarded_marks=[25, 7]),
        ],
    )
    assert [marks.stale_below(version, 0) for version in (0, 1, 3)] == [0, 8, 25]
    assert marks.stale_below(3, 1) == 7
    assert (
        marks.stale_below(2, 0) == 8
    )  # never opened; what lies below 8 is older than 1, so than 2
    assert marks.stale_below(-1, 0) == 0
