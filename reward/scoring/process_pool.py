"""Runs plain (synchronous) reward functions in processes, seen from the worker.

Python cannot stop a thread: not one that sleeps, and not one inside a regular expression that never
ends. A process can be killed. Trajectories go to it in batches. When it sends nothing for longer than
its functions may take, it is killed, and the trajectories without a result are retried one by one, so
that only the one that hangs fails.
"""

import multiprocessing
import queue
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver

from pool.core.trajectories import Trajectory
from reward import metrics
from reward.scoring.loading import RewardFunction
from reward.scoring.process_main import READY, serve
from reward.scoring.process_messages import ScoringRequest, decode_results, encode, pack
from reward.scoring.results import FunctionResult, failure_of
from servicekit.errors import Fatal

MAX_BATCH = 64
START_TIMEOUT_S = 120.0
JOIN_TIMEOUT_S = 5.0
FORK_SERVER = "reward.scoring.fork_server"

OnResult = Callable[[int, list[FunctionResult]], None]


class ProcessPool:
    """`submit` may be called from any thread. `on_result` is called from the pool's threads; with an
    empty list for a trajectory that `is_wanted` no longer wants when its turn comes.

    Create it in the main thread: the fork server ends with the thread that started it."""

    def __init__(
        self,
        specs: Sequence[str],
        functions: Sequence[RewardFunction],
        tokenizer: str | None,
        processes: int,
        on_result: OnResult,
        is_wanted: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self._specs = specs
        self._functions = functions
        self._tokenizer = tokenizer
        self._on_result = on_result
        self._is_wanted = is_wanted
        self._timeout_s = sum(function.timeout_s for function in functions)
        self._attempts = max(function.attempts for function in functions)
        self._requests: queue.Queue[ScoringRequest | None] = queue.Queue()
        """None ends the thread that takes it."""
        self._processes: list[ScoringProcess] = []
        self._is_closing = False
        self.error: Exception | None = None
        """Why nothing is scored any more."""
        multiprocessing.set_forkserver_preload([FORK_SERVER])
        forkserver.ensure_running()
        self._threads = [
            threading.Thread(target=self._run, name=f"reward-{number}", daemon=True)
            for number in range(processes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, number: int, trajectory: Trajectory) -> None:
        self._requests.put(pack(number, trajectory))

    def close(self) -> None:
        """Kills the processes at once. Trajectories without a result are scored again by the worker
        that gets their partition next."""
        self._is_closing = True
        for _ in self._threads:
            self._requests.put(None)
        for process in list(self._processes):
            process.interrupt()
        for thread in self._threads:
            thread.join(timeout=JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            process = self._start_process()
            while (batch := self._next_batch()) is not None:
                wanted = self._drop_unwanted(batch)
                for request in process.score(wanted, self._timeout_s, self._on_result):
                    process = self._retry_alone(process, request)
            process.kill()
        except Exception as error:
            self.error = error

    def _start_process(self) -> "ScoringProcess":
        process = ScoringProcess(self._specs, self._tokenizer)
        self._processes = [other for other in self._processes if other.is_alive()] + [process]
        process.wait_until_ready()
        return process

    def _next_batch(self) -> list[ScoringRequest] | None:
        first = self._requests.get()
        if first is None or self._is_closing:
            return None
        batch = [first]
        while len(batch) < MAX_BATCH and not self._requests.empty():
            request = self._requests.get()
            if request is None:
                self._requests.put(None)
                break
            batch.append(request)
        return batch

    def _drop_unwanted(self, batch: Sequence[ScoringRequest]) -> list[ScoringRequest]:
        wanted = []
        for request in batch:
            if self._is_wanted(request.number):
                wanted.append(request)
            else:
                self._on_result(request.number, [])
        return wanted

    def _retry_alone(self, process: "ScoringProcess", request: ScoringRequest) -> "ScoringProcess":
        """Returns the process to go on with: a new one if this request killed the old one."""
        for _ in range(self._attempts):
            if self._is_closing:
                return process
            if not process.is_alive():
                process = self._start_process()
            if not process.score(self._drop_unwanted([request]), self._timeout_s, self._on_result):
                return process
        reason = (
            f"it did not return within {self._timeout_s:g} s, or its process died, "
            f"in each of {self._attempts} attempts"
        )
        self._on_result(request.number, [failure_of(f, reason) for f in self._functions])
        return process


class ScoringProcess:
    """One process and the pipe to it."""

    def __init__(self, specs: Sequence[str], tokenizer: str | None) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, their_end = context.Pipe()
        self._process = context.Process(
            target=serve, args=(their_end, list(specs), tokenizer), daemon=True
        )
        self._process.start()
        their_end.close()

    def wait_until_ready(self) -> None:
        try:
            if self._pipe.poll(START_TIMEOUT_S) and self._pipe.recv_bytes() == READY:
                return
        except (EOFError, OSError):
            pass  # it died; stderr has the reason
        self.kill()
        raise Fatal(
            "a process for reward functions did not start; check that the file or module of each "
            "--function still exists and can be imported"
        )

    def score(
        self, batch: list[ScoringRequest], timeout_s: float, on_result: OnResult
    ) -> list[ScoringRequest]:
        """Returns the requests without a result. If there are any, the process was silent for longer
        than `timeout_s`, or died, and has been killed."""
        unanswered = {request.number: request for request in batch}
        if not unanswered:
            return []
        try:
            self._pipe.send_bytes(encode(batch))
            while unanswered and self._pipe.poll(timeout_s):
                for scored in decode_results(self._pipe.recv_bytes()):
                    del unanswered[scored.number]
                    for result, seconds in zip(scored.results, scored.seconds, strict=True):
                        metrics.seconds.labels(result.name).observe(seconds)
                    on_result(scored.number, scored.results)
        except (EOFError, OSError):
            pass  # it died: it exited by itself, or was killed for want of memory
        if unanswered:
            self.kill()
        return list(unanswered.values())

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def interrupt(self) -> None:
        """Kills the process, from any thread; a thread inside `score` then returns."""
        self._process.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
