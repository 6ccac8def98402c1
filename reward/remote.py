"""Asynchronous functions: judges and models behind a URL, many at once, in one event loop.

A call that takes too long, or fails, counts as an attempt. An outage does not: what a function needs
is away, so the trajectory waits, with pauses that grow, until it is back.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from reward import metrics
from reward.function import Function
from reward.isolated import failed, spoken
from reward.score import Opinion
from reward.verdict import RewardFailed, RewardUnavailable
from reward.view import TrajectoryView

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0


class Remote:
    """An event loop in a thread of its own."""

    def __init__(self, functions: Sequence[Function]) -> None:
        self._functions = functions
        self._room = {f.name: asyncio.Semaphore(f.at_once) for f in functions}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs something in the loop and waits for it; not from the loop itself."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, call)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop)

    async def opinions(self, view: TrajectoryView) -> list[Opinion]:
        return list(await asyncio.gather(*(self._ask(f, view) for f in self._functions)))

    async def _ask(self, function: Function, view: TrajectoryView) -> Opinion:
        pause, attempt = FIRST_PAUSE, 0
        while True:
            try:
                async with self._room[function.name]:
                    with metrics.seconds.labels(function.name).time():
                        async with asyncio.timeout(function.timeout_s):
                            return spoken(function, await function.call(view))
            except RewardUnavailable as away:
                log.warning("reward %s waits: %s", function.name, away)
            except RewardFailed as error:
                return failed(function, str(error))
            except Exception as error:
                attempt += 1
                if attempt >= function.attempts:
                    return failed(function, _why(function, error))
            metrics.retries.labels(function.name).inc()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)


def _why(function: Function, error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it did not come back within {function.timeout_s:g} s, {function.attempts} times"
    return f"{type(error).__name__}: {error}"
