"""Deciding: what trains next, and what became of everything else.

The decider's thread owns the consumer. It never stops reading while a batch is trained, so the lag
that operators see is true, gateways hear of decided groups, and nothing piles up in the client. The
loop's thread asks it for the next batch, and for everything else that the fenced producer writes.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from pool.errors import Fatal, PoolError
from pool.metrics import last_progress
from schemas import DecidedGroup, Decision
from trainer.deciding.aging import Aging
from trainer.deciding.decisions import Decisions
from trainer.deciding.judging import Judge
from trainer.deciding.settings import DecidingSettings
from trainer.deciding.showing import show_state
from trainer.deciding.tally import Tally
from trainer.incarnation import Incarnation

Answer = TypeVar("Answer")

POLL = 0.02
"""Seconds to wait for records: as long may a question of the loop wait."""
COMMIT_EVERY = 1.0
VERDICTS_EVERY = 10.0
"""Seconds after which verdicts are written although nothing is trained."""
MANY = 1_000
"""Verdicts that are written before their time: a Decision must fit into a message."""


class Decider:
    """`describe` gives what a Decision records of how its batch is trained."""

    def __init__(
        self,
        incarnation: Incarnation,
        settings: DecidingSettings,
        judge: Judge,
        describe: Callable[[int], dict[str, Any]],
        probe: Callable[[str], None] = lambda stage: None,
        verdicts_every: float = VERDICTS_EVERY,
    ) -> None:
        self._life = incarnation
        self._consumer = incarnation.consumer
        self._decisions = Decisions(incarnation, settings, judge, describe)
        self._aging = Aging(incarnation, settings, judge, self._decisions)
        self._probe = probe
        self._verdicts_every = verdicts_every
        self._wanted: Future[Decision] | None = None
        self._questions: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._failure: BaseException = Fatal("the decider has stopped")
        self._stopping = threading.Event()
        self._verdicts_at = self._committed_at = self.last_progress = time.monotonic()
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
        return self._aging.retention.checkpoint_is_due

    def saved(self, version: int) -> None:
        """A checkpoint has seen all up to this version: no restart asks for earlier Decisions."""

        def forget() -> None:
            self._aging.retention.saved_version = version
            self._life.forget_before(version)

        self.ask(forget).result()

    def close(self) -> None:
        """Writes the verdicts that are due, leaves the group."""
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
                if self._decisions.verdicts:
                    self._decisions.write_verdicts()
        except BaseException as error:
            self._failure = error
            self._give_up(error)
            if not isinstance(error, PoolError):
                raise

    def _give_up(self, error: BaseException) -> None:
        waiting: list[Future[Any]] = [self._questions.popleft()[1] for _ in self._questions.copy()]
        if self._wanted is not None:
            waiting.append(self._wanted)
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def _turn(self) -> None:
        self._answer()
        for work in self._consumer.poll(POLL):
            self._decisions.take(work)
        self._decisions.drop_lost_partitions()
        if self._decisions.version is not None:
            self._decide()
        if time.monotonic() - self._committed_at >= COMMIT_EVERY and self._consumer.commit():
            self._progressed()

    def _answer(self) -> None:
        while self._questions:
            question, answer = self._questions.popleft()
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

    def _decide(self) -> None:
        if self._wanted is not None:
            self._give_batch(self._wanted)
        self._aging.skip_what_is_stale()
        is_due = time.monotonic() - self._verdicts_at >= self._verdicts_every
        if is_due:
            self._aging.close_overdue()
            self._aging.expire_before_retention()
            show_state(self._life)
            self._verdicts_at = time.monotonic()
        verdicts = self._decisions.verdicts
        if verdicts and (is_due or verdicts.skipped or len(verdicts.others) > MANY):
            self._decisions.write_verdicts()
            self._progressed()

    def _give_batch(self, wanted: "Future[Decision]") -> None:
        decision = self._decisions.try_batch()
        if decision is not None:
            self._progressed()
            self._wanted = None
            self._probe("decided")
            wanted.set_result(decision)

    def _progressed(self) -> None:
        last_progress.set_to_current_time()
        self._committed_at = self.last_progress = time.monotonic()
