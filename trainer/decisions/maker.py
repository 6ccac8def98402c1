"""Collects what waits for a Decision, and writes Decisions.

A Decision and the offsets that it consumes are one transaction. What is undecided when the process
dies is read and decided again; what is decided stays decided.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pool.core.groups import Group, UngroupedTrajectory
from pool.core.progress import WorkItem
from pool.producers.output import Output
from schemas import DecidedGroup, Decision, PartitionOffsets
from servicekit.errors import Fatal
from trainer.decisions.batch_selection import (
    NO_MINIMUMS,
    closed_at,
    select_batch,
    split_by_turn,
)
from trainer.decisions.judge import Judge
from trainer.decisions.minimum_shares import MinimumShares
from trainer.decisions.pending import JudgedGroup, PendingVerdicts, ReadyGroup
from trainer.decisions.settings import DecisionSettings
from trainer.decisions.statistics import DecisionStatistics
from trainer.incarnation.base import Incarnation, now_ms
from trainer.incarnation.source import GroupItem

RETRY_S = 0.02
"""Seconds of reading before a refused transaction is tried again."""


class DecisionMaker:
    """Used only by the thread that owns the consumer. `describe` returns what a Decision records about
    the training of its batch: settings and seed. Without `minimums`, as offline, groups are taken in
    their order, whatever share their environment states."""

    def __init__(
        self,
        incarnation: Incarnation,
        settings: DecisionSettings,
        judge: Judge,
        describe: Callable[[int], dict[str, Any]],
        minimums: MinimumShares | None = None,
    ) -> None:
        self.ready: list[ReadyGroup] = []
        """Closed groups that can be trained."""
        self.verdicts = PendingVerdicts()
        self.batch_statistics: dict[int, DecisionStatistics] = {}
        """Of every batch that is not reported yet, by the sequence number of its Decision."""
        self.version: int | None = None
        """The version that the next batch starts from, which may still be in training. Nothing is
        judged before the loop has set it, since ages are unknown."""
        self._statistics = DecisionStatistics()
        self._incarnation = incarnation
        self._consumer = incarnation.consumer
        self._settings = settings
        self._judge = judge
        self._describe = describe
        self._minimums = minimums

    def set_version(self, version: int) -> None:
        """Judges all waiting groups again: those that became too old do not wait for the next batch."""
        if version != self.version:
            self.version = version
            waiting, self.ready = self.ready, []
            for ready in waiting:
                self.admit(ready)

    def newest(self) -> int:
        assert self.version is not None
        return self.version

    # Coming in

    def take(self, work: WorkItem[GroupItem]) -> None:
        if isinstance(work.item, Group):
            if self._minimums is not None:
                self._minimums.note(work.item)
            self.admit(ReadyGroup(work.item, work.assignment, work))
        elif isinstance(work.item, UngroupedTrajectory):
            self.verdicts.others.append(work.item.member())
            self.verdicts.works.append(work)
        else:
            self._consumer.finish([work], ())  # a stray record has no verdict of its own

    def admit(self, ready: ReadyGroup) -> None:
        """Queues the group for a batch, or notes its verdict: a group that cannot be trained now never
        can be."""
        if self.version is None:
            self.ready.append(ready)
            return
        decided = self.judge(ready.group)
        counts_anyway = decided.verdict == "no_variance" and self._settings.no_variance == "shrink"
        if decided.verdict == "train" or counts_anyway:
            self.ready.append(ready)
        else:
            self.verdicts.groups.append((ready, decided))

    def judge(self, group: Group) -> DecidedGroup:
        return self._judge.judge(group, self.newest())

    def drop_lost_partitions(self) -> None:
        """Forgets groups of partitions that were revoked; their next owner reads them again."""
        self.ready = [
            ready
            for ready in self.ready
            if self._consumer.assignment(ready.assignment.partition) is ready.assignment
        ]

    # Going out

    def try_batch(self) -> Decision | None:
        """Decides a full batch, if enough groups can still be trained."""
        target = self._settings.groups_per_batch
        return self._try_batch_of(target) if len(self.ready) >= target else None

    def try_rest(self) -> Decision | None:
        """Decides a batch of all groups that are left, when no more will come."""
        return self._try_batch_of(len(self.ready)) if self.ready else None

    def _try_batch_of(self, target: int) -> Decision | None:
        judged = [(ready, self.judge(ready.group)) for ready in self.ready]
        minimums = self._minimums.of_batch(target) if self._minimums is not None else NO_MINIMUMS
        selection = select_batch(judged, target, self._settings.no_variance, minimums)
        self.ready = selection.waiting
        self.verdicts.groups += selection.refused
        if not selection.batch:
            return None
        return self._commit(self._take_verdicts(selection.batch), has_batch=True)

    def write_verdicts(self) -> None:
        """Writes a Decision without a batch, unless all verdicts wait for an earlier group."""
        verdicts = self._take_verdicts([])
        if verdicts:
            self._commit(verdicts, has_batch=False)

    def write_decided(self, groups: list[DecidedGroup]) -> None:
        """Writes new verdicts on groups that were decided before, for example that they are lost."""
        self._incarnation.write(self._decision(groups, PendingVerdicts(), False, ()))

    def settle(self, decided: Iterable[ReadyGroup]) -> None:
        """Lets the assemblers forget the groups, in the order in which they closed."""
        assemblers = self._incarnation.assemblers
        for ready in sorted(decided, key=closed_at):
            position = self._consumer.position(ready.assignment.partition)
            if not ready.is_settled and position is not None:
                assemblers[ready.assignment.partition].decide(ready.group, position)
                ready.is_settled = True

    def _commit(self, verdicts: PendingVerdicts, has_batch: bool) -> Decision:
        """Retries until the transaction is committed."""
        # Before the commit, so that its bookmark no longer needs the groups decided with it.
        self.settle(ready for ready, _ in verdicts.groups)
        written: list[Decision] = []

        def outputs(offsets: Sequence[PartitionOffsets]) -> list[Output]:
            groups = [decided for _, decided in verdicts.groups]
            written[:] = [self._decision(groups, verdicts, has_batch, offsets)]
            return [self._incarnation.output(written[0])]

        finished = self._consumer.finish(
            list(verdicts.all_works()), outputs, list(verdicts.all_assignments())
        )
        while finished.state == "waiting":
            if not self._consumer.commit():
                for work in self._consumer.poll(RETRY_S):
                    self.take(work)
        if finished.state == "void":
            raise Fatal(
                "partitions were assigned to another member of the consumer group while a Decision "
                "was being written; only one trainer may be in the group"
            )
        self._incarnation.ledger.add(written[0])
        for ready, decided in verdicts.groups:
            self._statistics.add(ready, decided, self._incarnation.marks, self.version or 0)
        if has_batch:
            self.batch_statistics[written[0].sequence] = self._statistics
            self._statistics = DecisionStatistics()
        return written[0]

    def _take_verdicts(self, batch: list[JudgedGroup]) -> PendingVerdicts:
        verdicts, self.verdicts = self.verdicts, PendingVerdicts()
        decidable, self.verdicts.groups = split_by_turn(verdicts.groups, self.ready)
        verdicts.groups = batch + decidable
        verdicts.skipped += self._consumer.lost
        self._consumer.lost.clear()
        return verdicts

    def _decision(
        self,
        groups: list[DecidedGroup],
        verdicts: PendingVerdicts,
        has_batch: bool,
        offsets: Sequence[PartitionOffsets],
    ) -> Decision:
        sequence = self._incarnation.ledger.sequence + 1
        return Decision(
            run=self._incarnation.run,
            incarnation=self._incarnation.number,
            sequence=sequence,
            version=self.newest() + 1 if has_batch else None,
            groups=groups,
            others=verdicts.others,
            offsets=list(offsets),
            needs=self._incarnation.ledger.oldest_needed(),
            skipped=verdicts.skipped,
            created_at=now_ms(),
            topic=self._incarnation.topic,
            **(self._describe(sequence) if has_batch else {}),
        )
