"""What waits for a decision, and the writing of Decisions.

A Decision and the offsets it used up are one transaction. What is not decided when the process dies is
read again and decided then; what is decided stays so.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pool.core.groups import Group, UngroupedTrajectory
from pool.core.progress import WorkItem
from pool.producers.output import Output
from schemas import DecidedGroup, Decision, PartitionOffsets
from servicekit.errors import Fatal
from trainer.deciding.choosing import Judged, choose, closed_at, in_turn
from trainer.deciding.judging import Judge
from trainer.deciding.settings import DecidingSettings
from trainer.deciding.tally import Tally
from trainer.deciding.waiting import Item, Ready, Verdicts
from trainer.life import Life, now_ms

AGAIN = 0.02
"""Seconds of reading before a refused transaction is tried again."""


class Decisions:
    """To be used by the thread that owns the consumer. `describe` gives what a Decision records of how
    its batch is trained: settings, packing, seed."""

    def __init__(
        self,
        life: Life,
        settings: DecidingSettings,
        judge: Judge,
        describe: Callable[[int], dict[str, Any]],
    ) -> None:
        self.ready: list[Ready] = []
        """Closed groups that could be trained."""
        self.verdicts = Verdicts()
        self.tally = Tally()
        self.version: int | None = None
        """The newest. Before the loop has told it nothing is judged: nobody could say how old it is."""
        self._life = life
        self._consumer = life.consumer
        self._settings = settings
        self._judge = judge
        self._describe = describe

    def tell_version(self, version: int) -> None:
        """What waits is judged anew: what became too old keeps no place until the next batch."""
        if version != self.version:
            self.version = version
            waiting, self.ready = self.ready, []
            for ready in waiting:
                self.admit(ready)

    def newest(self) -> int:
        assert self.version is not None
        return self.version

    # Coming in

    def take(self, work: WorkItem[Item]) -> None:
        if isinstance(work.item, Group):
            self.admit(Ready(work.item, work.assignment, work))
        elif isinstance(work.item, UngroupedTrajectory):
            self.verdicts.others.append(work.item.member())
            self.verdicts.works.append(work)
        else:
            self._consumer.finish([work], ())  # a stray record has no verdict of its own

    def admit(self, ready: Ready) -> None:
        """A group that cannot be trained now never can be; it does not wait for a batch."""
        if self.version is None:
            self.ready.append(ready)
            return
        decided = self.judged(ready.group)
        counts = decided.verdict == "no_variance" and self._settings.no_variance == "shrink"
        if decided.verdict == "train" or counts:
            self.ready.append(ready)
        else:
            self.verdicts.groups.append((ready, decided))

    def judged(self, group: Group) -> DecidedGroup:
        return self._judge.judge(group, self.newest())

    def drop_lost_partitions(self) -> None:
        """Their next owner has what they hold."""
        self.ready = [
            ready
            for ready in self.ready
            if self._consumer.assignment(ready.assignment.partition) is ready.assignment
        ]

    # Going out

    def try_batch(self) -> Decision | None:
        """Decides a batch, if enough groups can still be trained."""
        wanted = self._settings.groups_per_batch
        return self._try(wanted) if len(self.ready) >= wanted else None

    def try_rest(self) -> Decision | None:
        """Decides a batch of what there is, since no more will come."""
        return self._try(len(self.ready)) if self.ready else None

    def _try(self, wanted: int) -> Decision | None:
        judged = [(ready, self.judged(ready.group)) for ready in self.ready]
        chosen = choose(judged, wanted, self._settings.no_variance)
        self.ready = chosen.waiting
        self.verdicts.groups += chosen.refused
        return self._commit(self._take_verdicts(chosen.batch), True) if chosen.batch else None

    def write_verdicts(self) -> None:
        """A Decision without a batch, unless all verdicts wait for an earlier group."""
        verdicts = self._take_verdicts([])
        if verdicts:
            self._commit(verdicts, False)

    def record(self, groups: list[DecidedGroup]) -> None:
        """A Decision on groups that were decided before, such as that they are lost."""
        self._life.write(self._decision(groups, Verdicts(), False, ()))

    def settle(self, decided: Iterable[Ready]) -> None:
        """The assemblers forget the groups, in the order in which they closed."""
        for ready in sorted(decided, key=closed_at):
            position = self._consumer.position(ready.assignment.partition)
            if not ready.settled and position is not None:
                self._life.assemblers[ready.assignment.partition].decide(ready.group, position)
                ready.settled = True

    def _commit(self, verdicts: Verdicts, trains: bool) -> Decision:
        """However often it takes."""
        # Before the commit, so that its bookmark no longer needs what is decided with it.
        self.settle(ready for ready, _ in verdicts.groups)
        written: list[Decision] = []

        def outputs(offsets: Sequence[PartitionOffsets]) -> list[Output]:
            groups = [judged for _, judged in verdicts.groups]
            written[:] = [self._decision(groups, verdicts, trains, offsets)]
            return [self._life.output(written[0])]

        finished = self._consumer.finish(
            list(verdicts.all_works()), outputs, list(verdicts.all_assignments())
        )
        while finished.state == "waiting":
            if not self._consumer.commit():
                for work in self._consumer.poll(AGAIN):
                    self.take(work)
        if finished.state == "void":
            raise Fatal("partitions went to another member of the group while a Decision was made")
        self._life.ledger.add(written[0])
        for ready, decided in verdicts.groups:
            self.tally.add(ready, decided, self._life.marks, self.version or 0)
        return written[0]

    def _take_verdicts(self, batch: list[Judged]) -> Verdicts:
        verdicts, self.verdicts = self.verdicts, Verdicts()
        decidable, self.verdicts.groups = in_turn(verdicts.groups, self.ready)
        verdicts.groups = batch + decidable
        verdicts.skipped += self._consumer.lost
        self._consumer.lost.clear()
        return verdicts

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
            version=self.newest() + 1 if trains else None,
            groups=groups,
            others=verdicts.others,
            offsets=list(offsets),
            needs=self._life.ledger.oldest_needed(),
            skipped=verdicts.skipped,
            created_at=now_ms(),
            topic=self._life.topic,
            **(self._describe(sequence) if trains else {}),
        )
