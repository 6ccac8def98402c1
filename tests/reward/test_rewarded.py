"""The order of precedence, and what `rewarded` holds of a trajectory."""

from typing import Any

import msgspec

from pool.core.progress import Received
from pool.core.trajectories import Trajectory, TrajectoryAssembler
from reward.scoring.results import FunctionResult
from reward.scoring.rewarded import ORPHAN, is_scored, rewarded_records
from schemas import Position, Record, Step, TrajectoryEnd
from tests.pool.records import end, note, step


def whole(*records: Record) -> Trajectory:
    assembler = TrajectoryAssembler()
    items = [assembler.feed(Received(record, 3, at)) for at, record in enumerate(records, 10)]
    assert isinstance(items[-1], Trajectory)
    return items[-1]


def said(
    name: str = "f", value: float | None = None, weight: float = 1.0, **more: Any
) -> FunctionResult:
    return FunctionResult(name, "1", weight, value, **more)


def last(records: list[Record]) -> TrajectoryEnd:
    assert isinstance(records[-1], TrajectoryEnd)
    return records[-1]


def test_functions_outweigh_what_the_agent_said() -> None:
    trajectory = whole(step("a"), end(steps=1, reward=0.25))
    results = [said("f", 1.0, 0.5), said("g", 3.0, 1.0)]
    assert last(rewarded_records(trajectory, results)).reward == 3.5


def test_a_function_without_an_opinion_leaves_it_to_the_agent() -> None:
    trajectory = whole(step("a"), end(steps=1, reward=0.25))
    assert last(rewarded_records(trajectory, [said("f", None)])).reward == 0.25


def test_rewards_of_steps_count_when_the_end_has_none() -> None:
    trajectory = whole(step("a", reward=1.0), step("b", reward=0.5), end(steps=2))
    assert last(rewarded_records(trajectory, [])).reward == 1.5


def test_no_reward_is_not_zero() -> None:
    assert last(rewarded_records(whole(step("a"), end(steps=1)), [said("f", None)])).reward is None


def test_every_component_is_kept_with_its_name_and_version() -> None:
    results = [said("f", 1.0, 0.5, details='{"why":"so"}'), said("g", None)]
    kept = last(rewarded_records(whole(step("a"), end(steps=1)), results)).rewards
    assert [(r.name, r.version, r.value, r.weight) for r in kept] == [
        ("f", "1", 1.0, 0.5),
        ("g", "1", None, 1.0),
    ]
    assert kept[0].details == '{"why":"so"}'


def test_a_failure_marks_the_trajectory_and_gives_no_reward() -> None:
    results = [said("f", 1.0), said("g", None, failure="ValueError: no")]
    closed = last(rewarded_records(whole(step("a"), end(steps=1, reward=1.0)), results))
    assert (closed.status, closed.reward) == ("failed", None)
    assert closed.reason == "reward g: ValueError: no"


def test_process_rewards_stand_on_their_steps() -> None:
    trajectory = whole(step("a"), step("b"), end(steps=2))
    results = [said("f", 0.0, 2.0, steps=[0.5, None]), said("g", 0.0, 1.0, steps=[1.0, 0.25])]
    first, second, closed = rewarded_records(trajectory, results)
    assert isinstance(first, Step) and first.reward == 2.0
    assert isinstance(second, Step) and second.reward == 0.25
    assert isinstance(closed, TrajectoryEnd)
    assert [(r.name, r.step_id, r.value) for r in closed.rewards if r.step_id] == [
        ("f", "a", 0.5),
        ("g", "a", 1.0),
        ("g", "b", 0.25),
    ]


def test_every_record_says_where_it_came_from() -> None:
    records = rewarded_records(whole(step("a"), step("b"), end(steps=2)), [])
    assert [getattr(record, "source", None) for record in records] == [
        Position(partition=3, offset=10 + at) for at in range(3)
    ]


def test_orphans_are_copied_and_marked() -> None:
    retried = [step("a", request_hash=b"same"), step("b", request_hash=b"same")]
    records = rewarded_records(whole(*retried, note("a", False), end(steps=2)), [])
    marks = [record.not_trainable for record in records if isinstance(record, Step)]
    assert marks == [ORPHAN, None]


def test_failed_and_broken_trajectories_are_not_scored() -> None:
    assert is_scored(whole(step("a"), end(steps=1)))
    assert not is_scored(whole(step("a"), end(steps=1, status="failed")))
    assert not is_scored(whole(step("a"), end(steps=2)))


def test_what_is_not_touched_stays_as_it_was() -> None:
    original = step("a", reward=0.5)
    (copied, _) = rewarded_records(whole(original, end(steps=1)), [])
    assert isinstance(copied, Step)
    assert msgspec.structs.replace(copied, source=None) == original
