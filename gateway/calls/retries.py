"""Finds the earlier attempt of a repeated request, so that a retry makes no second sample.

The OpenAI and Anthropic clients mark their retries. Of equal requests they retry the newest, which may
still run, may have failed, or may have left a Step through a process that was killed.

An unmarked repetition asks for another sample: agents vote, or see the same observation twice. The
only exception is a call whose Step could not be written. Nobody has its answer, and the log may have
the Step although its acknowledgement was lost; writing it again under its id leaves one Step.
"""

import asyncio
from contextlib import suppress

from gateway import metrics
from gateway.calls.call import LlmCall
from gateway.errors import Unavailable
from gateway.http.exchange import Exchange
from gateway.state.trajectories import Trajectories
from gateway.state.trajectory import RecordedStep, TrackedCall, TrajectoryState

RETRY_COUNT = b"x-stainless-retry-count"
READ_AGAIN_S = 3.0
"""Seconds to look for the Step of another process. Where the log cannot be read in that time, the
answer is generated again: retries must not pile up behind a broken connection."""


def is_marked_retry(exchange: Exchange) -> bool:
    return exchange.header(RETRY_COUNT) not in (None, "0")


def restart_unwritten(trajectory: TrajectoryState, request_hash: bytes) -> LlmCall | None:
    """The call of an equal request whose Step could not be written, started again."""
    return _restart(trajectory.pop_unwritten(request_hash))


async def find_attempt(
    trajectories: Trajectories, trajectory: TrajectoryState, request_hash: bytes, arrived: float
) -> LlmCall | RecordedStep | None:
    """The earlier attempt of a marked retry: its call, which runs, or its Step. `arrived` is when the
    retry came, in monotonic time."""
    await trajectories.registrar.ensure_registered(trajectory)
    running = trajectory.running_call(request_hash)
    if isinstance(running, LlmCall):
        metrics.retries_served.labels("joined").inc()
        return running
    unfinished = _restart(trajectory.pop_unfinished(request_hash))
    recorded = trajectory.recorded_step(request_hash)
    if unfinished is None and recorded is None and trajectory.read_at < arrived:
        # Another process may have written the Step before it was killed.
        with suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(READ_AGAIN_S):
                await trajectories.read_again(trajectory)
        recorded = trajectory.recorded_step(request_hash)
    return unfinished or recorded


def _restart(call: TrackedCall | None) -> LlmCall | None:
    if not isinstance(call, LlmCall):
        return None
    metrics.retries_served.labels("regenerated").inc()
    return call.start()
