"""Deciding: what trains next, and what became of everything else.

The decider's thread owns the consumer. It never stops reading while a batch is trained, so the lag
that operators see is true, gateways hear of decided groups, and nothing piles up in the client. The
loop's thread asks it for the next batch, and for everything else that the fenced producer writes.

A Decision and the offsets it used up are one transaction. What is not decided when the process dies is
read again and decided then; what is decided stays so.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from pool.errors import Fatal, PoolError
from pool.groups import Group, Outsider
from pool.metrics import last_progress
from pool.producer import Output
from pool.progress import Progress, Work
from schemas import DecidedGroup, Decision, PartitionOffsets
from trainer.deciding.choosing import Chosen, choose, closed_at, in_turn
from trainer.deciding.judging import Judge
from trainer.deciding.retention import Retention
from trainer.deciding.settings import DecidingSettings
from trainer.deciding.showing import show_state
from trainer.deciding.tally import Tally
from trainer.deciding.waiting import Item, Ready, Verdicts
from trainer.incarnation import Incarnation, now_ms

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

POLL = 0.02
"""Seconds to wait for records: as long may a question of the loop wait."""
COMMIT_EVERY = 1.0
VERDICTS_EVERY = 10.0
"""Seconds after which verdicts are written although nothing is trained."""
MANY = 1_000
"""So many are written before their time: a Decision must fit into a message."""


class Decider:
    """`describe` gives what a Decision records of how its batch is trained: settings, packing, seed."""

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
        self._settings = settings
        self._judge = judge
        self._describe = describe
        self._probe = probe
        self._verdicts_every = verdicts_every
        self._retention = Retention(incarnation)
        self._ready: list[Ready] = []
        self._verdicts = Verdicts()
        self._tally = Tally()
        self._version: int | None = None
        """The newest. Before the loop has told it nothing is judged: nobody could say how old it is."""
        self._wanted: Future[Decision] | None = None
        self._questions: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._failure: BaseException = Fatal("the decider has stopped")
        self._stopping = threading.Event()
        self._verdicts_at = self._committed_at = time.monotonic()
        self.last_progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="decider", daemon=True)

    # For the loop's thread

    def start(self) -> None:
        self._thread.start()

    def next_batch(self, version: int) -> "Future[Decision]":
        """The Decision on the batch that makes `version`, once there is one."""
        wanted: Future[Decision] = Future()

        def want() -> None:
            was_told = self._version is not None
            self._version, self._wanted = version - 1, wanted
            if not was_told:
                unjudged, self._ready = self._ready, []
                for ready in unjudged:
                    self._admit(ready)

        self.ask(want).result()
        return wanted

    def ask(self, question: Callable[[], Answer]) -> "Future[Answer]":
        """Runs a call in the thread that owns the consumer, and the right to write."""
        answer: Future[Answer] = Future()
        self._questions.append((question, answer))
        if not self._thread.is_alive():
            self._give_up(self._failure)
        return answer

    def tally(self) -> Tally:
        """What was decided since this was last asked."""

        def take() -> Tally:
            tally, self._tally = self._tally, Tally()
            return tally

        return self.ask(take).result()

    def declare_lost(self, groups: Sequence[DecidedGroup]) -> None:
        """Records that these decided groups cannot be trained: the log no longer has them."""
        lost = [
            msgspec.structs.replace(group, verdict="lost", reason="the log has deleted its records")
            for group in groups
        ]

        def declare() -> None:
            decision = self._decision(lost, Verdicts(), False, ())
            self._life.write(decision)

        self.ask(declare).result()

    def checkpoint_is_due(self) -> bool:
        """The log may soon delete what a restart would train again."""
        return self._retention.checkpoint_is_due

    def saved(self, version: int) -> None:
        """A checkpoint has seen all up to this version: no restart asks for earlier Decisions."""

        def forget() -> None:
            self._retention.saved_version = version
            self._life.forget_before(version)

        self.ask(forget).result()

    def ready(self) -> int:
        """Groups that could be trained now."""
        return len(self._ready)

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
                if self._verdicts:
                    self._decide(None)
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
            self._take(work)
        self._ready = [r for r in self._ready if self._is_ours(r.assignment)]
        now = time.monotonic()
        if self._wanted is not None and len(self._ready) >= self._settings.groups_per_batch:
            self._try_batch()
        due = self._version is not None and now - self._verdicts_at >= self._verdicts_every
        if self._version is not None:
            self._skip_what_is_stale()
        if due:
            self._close_overdue()
            self._expire_before_retention()
            show_state(self._life)
        if self._verdicts and (due or self._verdicts.skipped or len(self._verdicts.others) > MANY):
            self._decide(None)
        elif now - self._committed_at >= COMMIT_EVERY:
            self._commit()
        if due:
            self._verdicts_at = now

    def _answer(self) -> None:
        while self._questions:
            question, answer = self._questions.popleft()
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

    def _take(self, work: Work[Item]) -> None:
        if isinstance(work.item, Group):
            self._admit(Ready(work.item, work.assignment, work))
        elif isinstance(work.item, Outsider):
            self._verdicts.others.append(work.item.member())
            self._verdicts.works.append(work)
        else:
            self._consumer.finish([work], ())  # a stray record has no verdict of its own

    def _admit(self, ready: Ready) -> None:
        """A group that cannot be trained now never can be; it does not wait for a batch."""
        if self._version is None:
            self._ready.append(ready)
            return
        decided = self._judged(ready.group)
        counts = decided.verdict == "no_variance" and self._settings.no_variance == "shrink"
        if decided.verdict == "train" or counts:
            self._ready.append(ready)
        else:
            self._verdicts.groups.append((ready, decided))

    def _judged(self, group: Group) -> DecidedGroup:
        return self._judge.judge(group, self._newest())

    def _newest(self) -> int:
        assert self._version is not None
        return self._version

    def _is_ours(self, assignment: "Progress[Item]") -> bool:
        return self._consumer.assignment(assignment.partition) is assignment

    # What time and age do

    def _close_overdue(self) -> None:
        for partition, assembler in self._life.assemblers.items():
            assignment = self._consumer.assignment(partition)
            if assignment is not None:
                for group in assembler.overdue(now_ms()):
                    assembler.close(group)
                    self._admit(Ready(group, assignment))

    def _expire_before_retention(self) -> None:
        for partition, before in self._retention.endangered().items():
            self._abandon(partition, before, "the log is about to delete it")

    def _abandon(self, partition: int, before: int, reason: str) -> None:
        """Decides what is open and began before the offset, as it is."""
        assignment = self._consumer.assignment(partition)
        if assignment is None:
            return
        groups, unended = self._life.assemblers[partition].give_up(before, "expired", reason)
        for group in groups:
            self._verdicts.groups.append((Ready(group, assignment), self._judged(group)))
        self._verdicts.others += unended
        self._verdicts.assignments.append(assignment)

    def _skip_what_is_stale(self) -> None:
        """Everything below the mark of the oldest version that may train is too old for certain. Where
        reading has not come so far, it goes on there, without decoding what lies between."""
        oldest = self._newest() - self._settings.max_age
        if oldest <= 0 or not self._judge.skips():
            return
        for partition in list(self._life.assemblers):
            position = self._consumer.position(partition)
            horizon = self._life.marks.stale_below(oldest, partition)
            if position is not None and position < horizon:
                self._skip(partition, position, horizon)

    def _skip(self, partition: int, position: int, horizon: int) -> None:
        here = [r for r in self._ready if r.assignment.partition == partition]
        self._ready = [r for r in self._ready if r.assignment.partition != partition]
        self._verdicts.groups += [(r, self._judged(r.group)) for r in here]
        self._abandon(partition, position, "it lies in a range that is too old")
        done = [w for w in self._verdicts.all_works() if w.assignment.partition == partition]
        self._settle(r for r, _ in self._verdicts.groups if r.assignment.partition == partition)
        skipped = self._consumer.skip(partition, horizon, done)
        if skipped is not None:
            log.info("skipped %d..%d of %d: too old", skipped.first, skipped.end, partition)
            self._verdicts.skipped.append(skipped)

    # Decisions

    def _try_batch(self) -> None:
        judged = [(ready, self._judged(ready.group)) for ready in self._ready]
        chosen = choose(judged, self._settings.groups_per_batch, self._settings.no_variance)
        self._ready = chosen.waiting
        self._verdicts.groups += chosen.refused
        if chosen.batch:
            self._decide(chosen)

    def _decide(self, chosen: Chosen | None) -> None:
        """Commits a Decision, however often it takes; without a batch it is on verdicts alone."""
        verdicts, self._verdicts = self._verdicts, Verdicts()
        batch = chosen.batch if chosen is not None else []
        decidable, self._verdicts.groups = in_turn(verdicts.groups, self._ready)
        verdicts.groups = batch + decidable
        verdicts.skipped += self._consumer.lost
        self._consumer.lost.clear()
        # Before the commit, so that its bookmark no longer needs what is decided with it.
        self._settle(ready for ready, _ in verdicts.groups)
        written: list[Decision] = []

        def outputs(offsets: Sequence[PartitionOffsets]) -> list[Output]:
            decided = [judged for _, judged in verdicts.groups]
            written[:] = [self._decision(decided, verdicts, bool(batch), offsets)]
            return [self._life.output(written[0])]

        finished = self._consumer.finish(
            list(verdicts.all_works()), outputs, list(verdicts.all_assignments())
        )
        while finished.state == "waiting":
            if not self._consumer.commit():
                # Refused for now; what comes meanwhile is taken in the next turn.
                for work in self._consumer.poll(POLL):
                    self._take(work)
        if finished.state == "void":
            raise Fatal("partitions went to another member of the group while a Decision was made")
        self._committed(verdicts, written[0])

    def _decision(
        self,
        groups: list[DecidedGroup],
        verdicts: Verdicts,
        trains: bool,
        offsets: Sequence[PartitionOffsets],
    ) -> Decision:
        sequence = self._life.ledger.sequence + 1
        return Decision(
            run=self._life.run,
            incarnation=self._life.number,
            sequence=sequence,
            version=self._newest() + 1 if trains else None,
            groups=groups,
            others=verdicts.others,
            offsets=list(offsets),
            needs=self._life.ledger.needs(),
            skipped=verdicts.skipped,
            created_at=now_ms(),
            **(self._describe(sequence) if trains else {}),
        )

    def _committed(self, verdicts: Verdicts, decision: Decision) -> None:
        self._progressed()
        self._life.ledger.add(decision)
        for ready, decided in verdicts.groups:
            self._tally.add(ready, decided, self._life.marks, self._version or 0)
        if decision.version is not None and self._wanted is not None:
            self._probe("decided")
            wanted, self._wanted = self._wanted, None
            wanted.set_result(decision)

    def _settle(self, decided: Iterable[Ready]) -> None:
        """The assemblers forget the groups, in the order in which they closed."""
        for ready in sorted(decided, key=closed_at):
            position = self._consumer.position(ready.assignment.partition)
            if not ready.settled and position is not None:
                self._life.assemblers[ready.assignment.partition].decide(ready.group, position)
                ready.settled = True

    def _commit(self) -> None:
        if self._consumer.commit():
            self._progressed()

    def _progressed(self) -> None:
        last_progress.set_to_current_time()
        self._committed_at = self.last_progress = time.monotonic()
