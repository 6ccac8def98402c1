"""Trajectories whose last call did not fit into the model's context: they are truncated."""

import msgspec
import pytest

from pool.core.groups import Judgement, judge_member
from pool.core.progress import Received
from pool.core.trajectories import Trajectory
from reward.scoring.results import FunctionResult
from reward.scoring.rewarded import is_scored, rewarded_records
from reward.scoring.trajectory_view import view
from schemas import Record, StepNote, TrajectoryEnd
from schemas.records import Status
from tests.pool.records import copied, end, group_of, note, run_of, step, trajectory_of
from tests.reward.trajectories import text
from trainer.data.batch import is_truncated


def overflow(step_id: str = "a", trajectory: str = "t") -> StepNote:
    noted = note(step_id, True, trajectory, id=f"overflow-{step_id}")
    return msgspec.structs.replace(noted, overflowed=True)


def ended(status: Status, *records: Record) -> Trajectory:
    steps = sum(not isinstance(record, StepNote) for record in records)
    return trajectory_of(*records, end(steps=steps, status=status))


@pytest.mark.parametrize("status", ["completed", "failed", "expired", "truncated"])
def test_however_its_agent_ends_it_it_is_truncated(status: Status) -> None:
    """Agents that meet the error complete, fail, or are never heard of again."""
    trajectory = ended(status, step("a"), overflow())
    assert trajectory.status == "truncated" and is_truncated(trajectory)
    assert is_scored(trajectory) and view(trajectory, text).status == "truncated"
    assert trajectory.orphans == frozenset()


def test_what_was_cancelled_stays_cancelled() -> None:
    assert ended("cancelled", step("a"), overflow()).status == "cancelled"


def test_an_agent_that_went_on_with_a_shorter_history_was_not_cut_off() -> None:
    shorter = step("b", index=1, ids=(7,))
    assert ended("failed", step("a"), overflow(), shorter).status == "failed"
    assert ended("completed", step("a"), overflow(), shorter).status == "completed"
    assert ended("failed", step("a"), overflow(), shorter, overflow("b")).status == "truncated"


def test_an_answer_that_was_not_delivered_is_still_an_orphan() -> None:
    lost = msgspec.structs.replace(overflow("b"), delivered=False)
    records = [step("a"), step("b", index=1), note("b", False), lost]
    assert ended("failed", *records).orphans == {"b"}


def rewarded(trajectory: Trajectory, *results: FunctionResult) -> Trajectory:
    """As the trainer reads it after a reward worker."""
    copies = rewarded_records(trajectory, results)
    return trajectory_of(*copies)


def test_it_is_scored_and_keeps_its_place_in_its_group() -> None:
    cut = rewarded(ended("failed", step("a"), overflow()), FunctionResult("f", "1", 1.0, 0.25))
    assert (cut.end.status, cut.end.reward) == ("truncated", 0.25)
    group = group_of(*(received.record for received in cut.records), *run_of("u"))
    assert judge_member(group, group.members["t"]) == Judgement("train")


def test_one_that_no_function_can_score_has_failed() -> None:
    broken = FunctionResult("f", "1", 1.0, None, failure="it raised")
    cut = rewarded(ended("completed", step("a"), overflow()), broken)
    assert (cut.status, cut.end.reason) == ("failed", "reward f: it raised")


def test_the_order_is_that_of_steps_in_copies_too() -> None:
    """A Step that another process wrote may be copied in any order."""
    records = [
        copied(50, step("a"), 0),
        copied(51, overflow(), 2),
        copied(52, step("b", index=1), 1),
        Received(end(steps=2, status="failed"), 0, 53),
    ]
    last = records[-1].record
    assert isinstance(last, TrajectoryEnd)
    trajectory = Trajectory(
        steps=[records[0], records[2]],
        end=last,
        feedback=[],
        undelivered=frozenset(),
        records=records,
    )
    assert trajectory.overflowed and trajectory.status == "truncated"
