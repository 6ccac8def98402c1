"""The decider thread, which decides batches for the loop that trains them.

It owns the source of groups and the fenced producer. The loop's thread requests the next batch from it,
and submits to it every other call that reads from the source or writes records.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from schemas import DecidedGroup, Decision
from schemas.records import Verdict
from servicekit.errors import Fatal, SteplogError
from servicekit.metrics import last_progress
from trainer.decisions.maker import DecisionMaker
from trainer.decisions.statistics import DecisionStatistics
from trainer.incarnation.base import Incarnation

T = TypeVar("T")


class RangeEnded(Exception):
    """There will be no more batches: the whole range of an offline run is decided."""


class Decider(ABC):
    def __init__(
        self,
        incarnation: Incarnation,
        decisions: DecisionMaker,
        probe: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self._incarnation = incarnation
        self._consumer = incarnation.consumer
        self._decisions = decisions
        self._probe = probe
        self._batch: Future[Decision] | None = None
        """The batch that the loop waits for."""
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._failure: BaseException = Fatal("the decider thread has stopped")
        self._stopping = threading.Event()
        self.last_progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="decider", daemon=True)

    # Called by the loop's thread

    def start(self) -> None:
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Runs a call in the thread that owns the consumer and the producer."""
        future: Future[T] = Future()
        self._calls.append((call, future))
        if not self._thread.is_alive():
            self._fail_pending(self._failure)
        return future

    def next_batch(self, version: int) -> "Future[Decision]":
        """The Decision on the batch that makes `version`, as soon as there is one. The version before
        it may still be in training: ages are those that its groups have when it is made."""
        batch: Future[Decision] = Future()

        def request() -> None:
            self._batch = batch
            self._decisions.set_version(version - 1)

        self.submit(request).result()
        return batch

    def ready(self) -> int:
        """Number of groups that could be trained now."""
        return len(self._decisions.ready)

    def take_statistics(self, sequence: int) -> DecisionStatistics:
        """Statistics of the groups decided with this batch, and since the batch before it."""
        return self.submit(lambda: self._decisions.batch_statistics.pop(sequence)).result()

    def withdraw(self, groups: Sequence[DecidedGroup], verdict: Verdict, reason: str) -> None:
        """Records that these decided groups are not trained after all."""
        withdrawn = [
            msgspec.structs.replace(group, verdict=verdict, reason=reason) for group in groups
        ]
        self.submit(lambda: self._decisions.write_decided(withdrawn)).result()

    def checkpoint_is_due(self) -> bool:
        """Whether retention may soon delete batches that a restart would have to train again."""
        return False

    def note_checkpoint(self, version: int) -> None:
        """A checkpoint of this version is saved: no restart needs the Decisions before it."""
        self.submit(lambda: self._incarnation.forget_before(version)).result()

    def range_progress(self) -> tuple[int, int] | None:
        """Offsets read and offsets in all, if the range of offsets is limited."""
        return None

    def close(self) -> None:
        """Lets the thread write its pending verdicts, and waits until it has ended."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    # Called by the decider thread

    def _run(self) -> None:
        try:
            with self._consumer:
                while not self._stopping.is_set():
                    self._turn()
                self._run_calls()
                self._finish()
        except BaseException as error:
            self._failure = error
            self._fail_pending(error)
            if not isinstance(error, SteplogError):
                raise

    def _fail_pending(self, error: BaseException) -> None:
        pending: list[Future[Any]] = [self._calls.popleft()[1] for _ in self._calls.copy()]
        if self._batch is not None:
            pending.append(self._batch)
        for future in pending:
            if not future.done():
                future.set_exception(error)

    @abstractmethod
    def _turn(self) -> None:
        """Runs submitted calls, then reads and decides for a moment."""

    @abstractmethod
    def _finish(self) -> None:
        """Writes what remains to be written before the thread ends."""

    def _run_calls(self) -> None:
        while self._calls:
            call, future = self._calls.popleft()
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

    def _deliver(self, batch: "Future[Decision]", decision: Decision | None) -> None:
        """Hands the Decision, if there is one, to the loop that waits for it."""
        if decision is not None:
            self._note_progress()
            self._batch = None
            self._probe("decided")
            batch.set_result(decision)

    def _note_progress(self) -> None:
        last_progress.set_to_current_time()
        self.last_progress = time.monotonic()
