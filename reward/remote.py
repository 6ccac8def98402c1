"""Asynchronous functions: judges and models behind a URL, many at once, in one event loop.

A call that takes too long, or fails, counts as an attempt. An outage does not: what a function needs
is away, so the trajectory waits, with pauses that grow, until it is back or another worker has it.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from reward import functions, metrics
from reward.function import Function
from reward.isolated import failed, spoken
from reward.score import Opinion
from reward.verdict import RewardFailed, RewardUnavailable
from reward.view import TrajectoryView

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
TELL_EVERY = 10.0
"""Seconds between two warnings of an outage: thousands of trajectories may wait for it."""
GONE = "another worker has it"


class Remote:
    """An event loop in a thread of its own."""

    def __init__(self, functions: Sequence[Function]) -> None:
        self._functions = functions
        self._room = {f.name: asyncio.Semaphore(f.at_once) for f in functions}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote", daemon=True)
        self._tell_next: dict[str, float] = {}
        self._closing = False
        self.trouble: BaseException | None = None
        """Why something that was started has ended, if it was not meant to."""
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs something in the loop and waits for it; not from the loop itself."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, call)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(self._watched(work), self._loop)

    async def _watched(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except (Exception, SystemExit) as error:
            self.trouble = error

    def waits(self, name: str, why: str) -> None:
        """Says that a function is short of something; from any thread."""
        metrics.retries.labels(name).inc()
        if (now := time.monotonic()) >= self._tell_next.get(name, 0.0):
            self._tell_next[name] = now + TELL_EVERY
            log.warning("reward %s waits: %s", name, why)

    async def opinions(
        self, view: TrajectoryView, is_wanted: Callable[[], bool] = lambda: True
    ) -> list[Opinion]:
        return list(await asyncio.gather(*(self._ask(f, view, is_wanted) for f in self._functions)))

    async def _ask(
        self, function: Function, view: TrajectoryView, is_wanted: Callable[[], bool]
    ) -> Opinion:
        pause, attempt = FIRST_PAUSE, 0
        while True:
            try:
                async with self._room[function.name]:
                    if not is_wanted():
                        return failed(function, GONE)
                    with metrics.seconds.labels(function.name).time():
                        async with asyncio.timeout(function.timeout_s):
                            return spoken(function, await function.call(view), view)
            except RewardUnavailable as away:
                self.waits(function.name, str(away))
            except RewardFailed as error:
                return failed(function, str(error))
            except (Exception, asyncio.CancelledError, SystemExit) as error:
                if self._closing:
                    raise
                attempt += 1
                if attempt >= function.attempts:
                    return failed(function, _why(function, error))
                metrics.retries.labels(function.name).inc()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def close(self) -> None:
        """At once: what is not answered is asked again by the next owner."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._loop.is_running():
            self._loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._functions:
            await functions.close()


def _why(function: Function, error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"it did not come back within {function.timeout_s:g} s, {function.attempts} times"
    return f"{type(error).__name__}: {error}"
