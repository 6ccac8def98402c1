"""Runs asynchronous reward functions, such as judges behind a URL: many at once, in one event loop.

A call that times out or raises counts as an attempt. An outage (RewardUnavailable) does not: the
trajectory waits, with growing pauses, until the service is back or another worker has the trajectory.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from reward import functions, metrics
from reward.scoring.loading import RewardFunction
from reward.scoring.results import FunctionResult, failure_of, result_of
from steplog.rewards import RewardFailed, RewardUnavailable, Trajectory

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
WARNING_INTERVAL_S = 10.0
"""Between two warnings of an outage: thousands of trajectories may wait for the same service."""
CLOSE_TIMEOUT_S = 5.0
REASSIGNED = "another worker has the trajectory"


class AsyncFunctions:
    """The asynchronous functions and their event loop, which runs in its own thread."""

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._functions = functions
        self._semaphores = {f.name: asyncio.Semaphore(f.at_once) for f in functions}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote", daemon=True)
        self._next_warning: dict[str, float] = {}
        self._is_closing = False
        self.error: BaseException | None = None
        """The exception that ended a started coroutine."""
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine in the loop and waits for it; not from the loop's own thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, callback)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(self._keep_error(coroutine), self._loop)

    async def _keep_error(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        try:
            await coroutine
        except (Exception, SystemExit) as error:
            self.error = error

    def report_outage(self, name: str, reason: str) -> None:
        """Counts a retry, and warns now and then that a function waits; from any thread."""
        metrics.retries.labels(name).inc()
        if (now := time.monotonic()) >= self._next_warning.get(name, 0.0):
            self._next_warning[name] = now + WARNING_INTERVAL_S
            log.warning("reward %s is unavailable, its trajectories wait: %s", name, reason)

    async def score(
        self, trajectory: Trajectory, is_wanted: Callable[[], bool] = lambda: True
    ) -> list[FunctionResult]:
        calls = (self._call(function, trajectory, is_wanted) for function in self._functions)
        return list(await asyncio.gather(*calls))

    async def _call(
        self, function: RewardFunction, trajectory: Trajectory, is_wanted: Callable[[], bool]
    ) -> FunctionResult:
        pause_s, attempt = FIRST_PAUSE_S, 0
        while True:
            try:
                async with self._semaphores[function.name]:
                    if not is_wanted():
                        return failure_of(function, REASSIGNED)
                    with metrics.seconds.labels(function.name).time():
                        async with asyncio.timeout(function.timeout_s):
                            returned = await function.call(trajectory)
                    return result_of(function, returned, trajectory)
            except RewardUnavailable as outage:
                self.report_outage(function.name, str(outage))
            except RewardFailed as error:
                return failure_of(function, error)
            except (Exception, asyncio.CancelledError, SystemExit) as error:
                if self._is_closing:
                    raise
                attempt += 1
                if attempt >= function.attempts:
                    return failure_of(function, _failure_reason(function, error))
                metrics.retries.labels(function.name).inc()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def close(self) -> None:
        """Cancels all calls at once; the worker that gets the partition next repeats them."""
        self._is_closing = True
        with contextlib.suppress(TimeoutError):
            cancelling = asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
            cancelling.result(timeout=CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_TIMEOUT_S)
        if not self._loop.is_running():
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._functions:
            await functions.close()


def _failure_reason(function: RewardFunction, error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return (
            f"it did not return within {function.timeout_s:g} s, "
            f"in each of {function.attempts} attempts"
        )
    return f"{type(error).__name__}: {error}"
