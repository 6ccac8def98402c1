"""The thread that decides, for the loop that trains.

It owns the source of groups and the right to write. The loop's thread asks it for the next batch, and
for everything else that the fenced producer writes.
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
from servicekit.errors import Fatal, SteplogError
from servicekit.metrics import last_progress
from trainer.deciding.decisions import Decisions
from trainer.deciding.tally import Tally
from trainer.life import Life

Answer = TypeVar("Answer")


class RangeEnded(Exception):
    """There will be no more batches: all that was to be read is decided."""


class DecidingThread(ABC):
    def __init__(
        self,
        life: Life,
        decisions: Decisions,
        probe: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self._life = life
        self._consumer = life.consumer
        self._decisions = decisions
        self._probe = probe
        self._wanted: Future[Decision] | None = None
        self._questions: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._failure: BaseException = Fatal("the decider has stopped")
        self._stopping = threading.Event()
        self.last_progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="decider", daemon=True)

    # For the loop's thread

    def start(self) -> None:
        self._thread.start()

    def ask(self, question: Callable[[], Answer]) -> "Future[Answer]":
        """Runs a call in the thread that owns the consumer, and the right to write."""
        answer: Future[Answer] = Future()
        self._questions.append((question, answer))
        if not self._thread.is_alive():
            self._give_up(self._failure)
        return answer

    def next_batch(self, version: int) -> "Future[Decision]":
        """The Decision on the batch that makes `version`, once there is one."""
        wanted: Future[Decision] = Future()

        def want() -> None:
            self._wanted = wanted
            self._decisions.tell_version(version - 1)

        self.ask(want).result()
        return wanted

    def ready(self) -> int:
        """Groups that could be trained now."""
        return len(self._decisions.ready)

    def tally(self) -> Tally:
        """What was decided since this was last asked."""

        def take() -> Tally:
            tally, self._decisions.tally = self._decisions.tally, Tally()
            return tally

        return self.ask(take).result()

    def declare_lost(self, groups: Sequence[DecidedGroup]) -> None:
        """Records that these decided groups cannot be trained: the log no longer has them."""
        lost = [
            msgspec.structs.replace(group, verdict="lost", reason="the log has deleted its records")
            for group in groups
        ]
        self.ask(lambda: self._decisions.record(lost)).result()

    def checkpoint_is_due(self) -> bool:
        """The log may soon delete what a restart would train again."""
        return False

    def saved(self, version: int) -> None:
        """A checkpoint has seen all up to this version: no restart asks for earlier Decisions."""
        self.ask(lambda: self._life.forget_before(version)).result()

    def read(self) -> tuple[int, int] | None:
        """How many offsets of how many are read, where that has an end."""
        return None

    def close(self) -> None:
        """Lets it say its last words, and waits for its end."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    # In its own thread

    def _run(self) -> None:
        try:
            with self._consumer:
                while not self._stopping.is_set():
                    self._turn()
                self._answer()
                self._leave()
        except BaseException as error:
            self._failure = error
            self._give_up(error)
            if not isinstance(error, SteplogError):
                raise

    def _give_up(self, error: BaseException) -> None:
        waiting: list[Future[Any]] = [self._questions.popleft()[1] for _ in self._questions.copy()]
        if self._wanted is not None:
            waiting.append(self._wanted)
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    @abstractmethod
    def _turn(self) -> None:
        """Answers, reads and decides for a moment."""

    @abstractmethod
    def _leave(self) -> None:
        """The last words of this life."""

    def _answer(self) -> None:
        while self._questions:
            question, answer = self._questions.popleft()
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

    def _give(self, wanted: "Future[Decision]", decision: Decision | None) -> None:
        """The batch that the loop waits for, if there is one."""
        if decision is not None:
            self._progressed()
            self._wanted = None
            self._probe("decided")
            wanted.set_result(decision)

    def _progressed(self) -> None:
        last_progress.set_to_current_time()
        self.last_progress = time.monotonic()
