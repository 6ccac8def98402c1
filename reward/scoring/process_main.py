"""The scoring process: receives trajectories, calls the plain reward functions, sends results back."""

import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe

from reward.scoring.loading import RewardFunction, load_all
from reward.scoring.parent_death import die_with_parent
from reward.scoring.process_messages import (
    ScoringRequest,
    ScoringResult,
    decode_requests,
    encode,
    unpack,
)
from reward.scoring.results import FunctionResult, failure_of, result_of
from reward.scoring.text import TextDecoder
from reward.scoring.trajectory_view import view
from steplog.rewards import Trajectory

READY = b"ready"
FLUSH_INTERVAL_S = 0.02
"""After this time results are sent although the batch is not done, which also shows that the process
is alive."""


def serve(pipe: Pipe, specs: Sequence[str], tokenizer: str | None) -> None:
    """Scores batches until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker
    die_with_parent()
    functions = [function for function in load_all(specs) if not function.is_async]
    decoder = TextDecoder(tokenizer)
    pipe.send_bytes(READY)
    while True:
        try:
            requests = decode_requests(pipe.recv_bytes())
        except EOFError:
            return
        _score_batch(pipe, requests, functions, decoder)


def _score_batch(
    pipe: Pipe,
    requests: Sequence[ScoringRequest],
    functions: Sequence[RewardFunction],
    decoder: TextDecoder,
) -> None:
    results: list[ScoringResult] = []
    flushed = time.monotonic()
    for request in requests:
        results.append(_score(request, functions, decoder))
        if time.monotonic() - flushed > FLUSH_INTERVAL_S:
            pipe.send_bytes(encode(results))
            results, flushed = [], time.monotonic()
    pipe.send_bytes(encode(results))


def _score(
    request: ScoringRequest, functions: Sequence[RewardFunction], decoder: TextDecoder
) -> ScoringResult:
    trajectory = view(unpack(request), decoder.decode)
    scored = ScoringResult(request.number, [], [])
    for function in functions:
        began = time.perf_counter()
        scored.results.append(_call(function, trajectory))
        scored.seconds.append(time.perf_counter() - began)
    return scored


def _call(function: RewardFunction, trajectory: Trajectory) -> FunctionResult:
    """Whatever the function raises is a failure of this trajectory only."""
    try:
        return result_of(function, function.call(trajectory), trajectory)
    except Exception as error:
        return failure_of(function, error)
