"""Failures wait until it is clear whether the trajectory or the function is at fault."""

import pytest

from reward.scoring.results import FunctionResult
from reward.scoring.scorer import ScoringJob
from reward.worker.held_failures import MAX_IN_A_ROW, QUIET_S, HeldFailures
from servicekit.errors import Fatal
from tests.pool.records import end, step, trajectory_of


def job(*, failure: str | None = None, uid: str = "t", scored: bool = True) -> ScoringJob:
    trajectory = trajectory_of(step("s", uid), end(uid, channel="math"))
    result = FunctionResult("score", "1", 1.0, None if failure else 1.0, failure=failure)
    return ScoringJob(trajectory, lambda job: None, results=[result] if scored else [])


def failed() -> ScoringJob:
    return job(failure="KeyError: 'answer'")


def test_what_succeeds_is_written_at_once() -> None:
    held, good = HeldFailures(), job()
    held.add(good, 0.0)
    assert held.take_released(0.0) == [good]
    assert held.take_released(0.0) == []


def test_a_success_releases_the_failures_before_it_in_their_order() -> None:
    held, jobs = HeldFailures(), [failed(), job(scored=False), failed(), job()]
    for one in jobs[:3]:
        held.add(one, 0.0)
        assert held.take_released(0.0) == []
    held.add(jobs[3], 0.0)
    assert held.take_released(0.0) == jobs


def test_failures_are_written_when_there_was_no_other_for_a_while() -> None:
    held, jobs = HeldFailures(), [failed(), failed()]
    held.add(jobs[0], 0.0)
    held.add(jobs[1], QUIET_S - 0.1)
    assert held.take_released(QUIET_S) == []
    assert held.take_released(2 * QUIET_S) == jobs


@pytest.mark.parametrize("scored_before", [0, 5_000])
def test_a_hundred_failures_in_a_row_stop_the_worker_and_none_is_written(
    scored_before: int,
) -> None:
    held = HeldFailures()
    for _ in range(scored_before):
        held.add(job(), 0.0)
    assert len(held.take_released(0.0)) == scored_before
    with pytest.raises(Fatal) as stopped:
        for number in range(MAX_IN_A_ROW):
            held.add(job(failure="KeyError: 'answer'", uid=f"t{number}"), float(number))
            assert held.take_released(float(number)) == []
    assert str(stopped.value) == (
        "Reward score failed on 100 trajectories in a row; on the last one, t99 in channel math: "
        "KeyError: 'answer'. Correct the function, or leave its channel out of --channels, and "
        "restart the worker: it scores the last 100 again."
    )


def test_a_function_that_fails_on_most_trajectories_stops_the_worker() -> None:
    held = HeldFailures()
    with pytest.raises(Fatal, match="failed on 100 of the last 150 trajectories"):
        for number in range(1_000):
            held.add(failed() if number % 3 else job(), 0.0)
