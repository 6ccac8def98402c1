"""The order of precedence, and what `rewarded` holds of a trajectory."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.core.progress import Received
from pool.core.rewards import given_rewards
from pool.core.trajectories import Trajectory, TrajectoryAssembler
from reward.scoring.results import FunctionResult
from reward.scoring.rewarded import ORPHAN, is_scored, rewarded_records
from reward.scoring.trajectory_view import view
from schemas import Position, Record, Step, TrajectoryEnd
from tests.pool.records import at, copied, end, feedback, log, note, step
from tests.reward.trajectories import text


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


def test_feedback_on_steps_before_the_end_is_in_the_sum() -> None:
    rated = [step("a", reward=1.0), feedback(0.25, step_id="a"), step("b"), end(steps=2)]
    closed = last(rewarded_records(whole(*rated), []))
    assert (closed.reward, closed.reward_from_steps) == (0.25, True)


def test_functions_see_the_rewards_that_steps_were_given_before_the_end() -> None:
    steps = [step("a", reward=1.0), step("b", reward=0.5), step("c"), feedback(0.25, step_id="a")]
    shown = view(whole(*steps, feedback(9.0), end(steps=3)), text)
    assert [one.reward for one in shown.steps] == [0.25, 0.5, None]


def test_process_rewards_of_functions_are_summed_if_there_is_nothing_else() -> None:
    trajectory = whole(step("a", reward=5.0), step("b"), end(steps=2))
    results = [said("f", None, 2.0, steps=[0.5, None]), said("g", None, 1.0, steps=[1.0, 0.25])]
    closed = last(rewarded_records(trajectory, results))
    assert (closed.reward, closed.reward_from_steps) == (2.25, True)


def test_only_a_sum_of_steps_is_marked_as_one() -> None:
    rated = [step("a", reward=1.0), end(steps=1, reward=1.0)]
    assert not last(rewarded_records(whole(*rated), [])).reward_from_steps
    assert not last(rewarded_records(whole(*rated), [said("f", 1.0)])).reward_from_steps
    assert not last(rewarded_records(whole(step("a"), end(steps=1)), [])).reward_from_steps


@pytest.mark.parametrize("status", ["failed", "cancelled", "expired"])
def test_steps_of_a_trajectory_that_is_not_scored_are_not_summed(status: str) -> None:
    trajectory = whole(step("a", reward=1.0), end(steps=1, status=status))
    assert last(rewarded_records(trajectory, [])).reward is None


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


RATED = st.builds(
    lambda reward, step_id, id: feedback(reward, step_id=step_id, id=id),
    st.sampled_from([0.1, 0.2, 0.7, -0.3]),
    st.sampled_from(["a", "b", "c", None]),
    st.sampled_from(["f1", "f2", "f3", "f4"]),
)
REWARDS = st.none() | st.sampled_from([0.1, 0.3])


@given(REWARDS, REWARDS, REWARDS, st.lists(RATED, max_size=4), st.lists(RATED, max_size=4))
def test_a_reward_is_the_same_in_steps_and_in_rewarded(
    of_a: float | None,
    of_b: float | None,
    of_end: float | None,
    early: list[Record],
    late: list[Record],
) -> None:
    """To the last bit, and in whatever order late Feedback was copied."""
    submitted = [step("a", reward=of_a), step("b", index=1, reward=of_b)]
    ended = whole(*submitted, *early, end(steps=2, reward=of_end))
    later = log(*late, first=100, partition=3)
    assembler = TrajectoryAssembler()
    [*_, scored] = [
        assembler.feed(at(offset, record, 3))
        for offset, record in enumerate(rewarded_records(ended, []), 200)
    ]
    assert isinstance(scored, Trajectory)
    copies = [copied(500 - r.offset, r.record, r.offset, 3) for r in reversed(later)]
    assert given_rewards(scored, copies).counting == given_rewards(ended, later).counting
    assert scored.end.reward == given_rewards(ended).without_feedback
