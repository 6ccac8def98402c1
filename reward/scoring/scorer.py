"""Passes a trajectory through all reward functions: plain ones in processes, then asynchronous ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from pool.core.progress import WorkItem
from pool.core.trajectories import StrayRecord, Trajectory, step_of
from reward.scoring.async_functions import AsyncFunctions
from reward.scoring.loading import RewardFunction
from reward.scoring.process_pool import ProcessPool
from reward.scoring.results import FunctionResult, failure_of
from reward.scoring.rewarded import first_failure, is_scored
from reward.scoring.text import TextDecoder
from reward.scoring.trajectory_view import view
from servicekit.errors import Fatal
from servicekit.spans import NO_SPAN, Span
from servicekit.tokenizer import TokenizerFolder

OUTAGE_PAUSE_S = 2.0

Item = Trajectory | StrayRecord
"""What the consumer of `steps` hands out: a complete trajectory, or a record without one."""


@dataclass(eq=False)
class ScoringJob:
    """An item on its way through the functions. `on_scored` is called once, with the job."""

    item: Item
    on_scored: Callable[["ScoringJob"], None]
    work: WorkItem[Item] | None = None
    """None for a trajectory that came by HTTP."""
    results: list[FunctionResult] = field(default_factory=list)
    is_wanted: Callable[[], bool] = lambda: True
    """False once its partition belongs to another worker."""
    span: Span = NO_SPAN

    @property
    def failure(self) -> FunctionResult | None:
        return first_failure(self.results)

    @property
    def key(self) -> str:
        record = self.item.end if isinstance(self.item, Trajectory) else self.item.received.record
        return str(getattr(record, "prompt_uid", ""))


class Scorer:
    """All reward functions of a worker, and the processes and the event loop that run them."""

    def __init__(
        self,
        specs: Sequence[str],
        functions: Sequence[RewardFunction],
        tokenizer: str | None,
        processes: int,
    ) -> None:
        plain = [function for function in functions if not function.is_async]
        asynchronous = [function for function in functions if function.is_async]
        self.async_functions = AsyncFunctions(asynchronous)
        self._has_async = bool(asynchronous)
        self._decoder = TextDecoder(tokenizer)
        self._functions = functions
        self._tokenizer = TokenizerFolder(tokenizer) if tokenizer and functions else None
        self._order = {function.name: position for position, function in enumerate(functions)}
        self._numbers = count()
        self._in_processes: dict[int, ScoringJob] = {}
        self._processes = (
            ProcessPool(specs, plain, tokenizer, processes, self._take_results, self._is_wanted)
            if plain
            else None
        )

    def submit(self, job: ScoringJob) -> None:
        if not isinstance(job.item, Trajectory) or not is_scored(job.item):
            job.on_scored(job)
        elif (mismatch := self._tokenizer_mismatch(job.item)) is not None:
            job.results = [failure_of(function, mismatch) for function in self._functions]
            job.on_scored(job)
        elif self._processes is not None:
            number = next(self._numbers)
            self._in_processes[number] = job
            self._processes.submit(number, job.item)
        else:
            self._call_async_functions(job)

    def _tokenizer_mismatch(self, trajectory: Trajectory) -> str | None:
        """Why functions would see another text than the one that was sampled."""
        if self._tokenizer is None:
            return None
        recorded = {step_of(received).tokenizer for received in trajectory.steps}
        other = next((name for name in recorded if not self._tokenizer.matches(name)), None)
        return f"the tokenizer {self._tokenizer.difference(other)}" if other else None

    def check(self) -> None:
        """Raises Fatal if the processes or the event loop have stopped: they would never answer."""
        error = self.async_functions.error
        if self._processes is not None:
            error = error or self._processes.error
        if isinstance(error, Fatal):
            raise error
        if error is not None:
            raise Fatal(f"scoring has stopped: {error!r}") from error

    def _is_wanted(self, number: int) -> bool:
        return self._in_processes[number].is_wanted()

    def _take_results(self, number: int, results: list[FunctionResult]) -> None:
        """Called with the results of the plain functions. If outages are their only failures, the
        trajectory is scored again after a pause."""
        job = self._in_processes.pop(number)
        failures = [result for result in results if result.failure is not None]
        if failures and all(result.is_outage for result in failures) and job.is_wanted():
            self.async_functions.report_outage(failures[0].name, str(failures[0].failure))
            self.async_functions.call_later(OUTAGE_PAUSE_S, lambda: self.submit(job))
            return
        job.results += results
        self._call_async_functions(job)

    def _call_async_functions(self, job: ScoringJob) -> None:
        if not self._has_async or job.failure is not None:
            self._finish(job)
        else:
            self.async_functions.start(self._await_async_functions(job))

    async def _await_async_functions(self, job: ScoringJob) -> None:
        assert isinstance(job.item, Trajectory)
        trajectory = view(job.item, self._decoder.decode)
        job.results += await self.async_functions.score(trajectory, job.is_wanted)
        self._finish(job)

    def _finish(self, job: ScoringJob) -> None:
        job.results.sort(key=lambda result: self._order[result.name])
        job.on_scored(job)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()
        self.async_functions.close()
