"""Holds failures back until it is clear whether the trajectory or the function is at fault.

A failure that is written is final: its trajectory leaves the group. So failures wait until some
trajectory is scored, which shows that the functions work, or until nothing has failed for a while. If
instead a hundred fail in a row, the worker stops, and none of them has been written: after a restart
with a better function they are scored again. Results after a held failure wait with it, since the
results of a prompt keep their order.
"""

from pool.core.failure_rate import FailureRate
from pool.core.trajectories import Trajectory
from reward.scoring.results import FunctionResult
from reward.scoring.scorer import ScoringJob
from servicekit.errors import Fatal

QUIET_S = 5.0
"""Failures are written when there was no other for this long."""
MAX_IN_A_ROW = 100


class HeldFailures:
    """Scored jobs on their way to the output, in the order in which they were added."""

    def __init__(self) -> None:
        self._jobs: list[ScoringJob] = []
        self._failures = 0
        """How many of the jobs are failures."""
        self._in_a_row = 0
        self._rate = FailureRate()
        self._quiet_at = 0.0

    def add(self, job: ScoringJob, now: float) -> None:
        """Raises Fatal if failures are no exception any more."""
        self._jobs.append(job)
        if (failure := job.failure) is not None:
            self._add_failure(job, failure, now)
        elif job.results:
            self._rate.count_good()
            self._failures = self._in_a_row = 0

    def _add_failure(self, job: ScoringJob, failure: FunctionResult, now: float) -> None:
        self._failures += 1
        self._in_a_row += 1
        self._quiet_at = now + QUIET_S
        if self._rate.count_bad() or self._in_a_row >= MAX_IN_A_ROW:
            raise Fatal(self._explain(job, failure))

    def take_released(self, now: float) -> list[ScoringJob]:
        """The jobs that may be written."""
        if self._failures and now < self._quiet_at:
            return []
        self._failures = 0
        released, self._jobs = self._jobs, []
        return released

    def _explain(self, job: ScoringJob, failure: FunctionResult) -> str:
        assert isinstance(job.item, Trajectory)
        is_row = self._in_a_row >= MAX_IN_A_ROW
        many = f"{self._in_a_row} trajectories in a row" if is_row else f"{self._rate} trajectories"
        return (
            f"Reward {failure.name} failed on {many}; on the last one, {job.item.uid} in channel "
            f"{job.item.end.channel}: {failure.failure}. Correct the function, or leave its channel "
            f"out of --channels, and restart the worker: it scores the last {self._failures} again."
        )
