"""Gives verdicts to groups that ran out of time: past their deadline, too old, or close to deletion."""

import logging

from schemas.records import Verdict
from trainer.decisions.judge import Judge
from trainer.decisions.maker import DecisionMaker
from trainer.decisions.pending import ReadyGroup
from trainer.decisions.retention import Retention
from trainer.decisions.settings import DecisionSettings
from trainer.incarnation.base import now_ms
from trainer.incarnation.live import LiveIncarnation

log = logging.getLogger(__name__)


class GroupExpiry:
    """Checked only while decisions are made, never by a clock of its own."""

    def __init__(
        self,
        incarnation: LiveIncarnation,
        settings: DecisionSettings,
        judge: Judge,
        decisions: DecisionMaker,
    ) -> None:
        self.retention = Retention(incarnation)
        self._incarnation = incarnation
        self._consumer = incarnation.consumer
        self._settings = settings
        self._judge = judge
        self._decisions = decisions

    def close_overdue(self) -> None:
        """Closes groups at their deadline; they are judged with the members that they have."""
        for partition, assembler in self._incarnation.assemblers.items():
            assignment = self._consumer.assignment(partition)
            if assignment is not None:
                for group in assembler.overdue(now_ms()):
                    assembler.close(group)
                    self._decisions.admit(ReadyGroup(group, assignment))

    def expire_before_retention(self) -> None:
        """Decides open groups whose records Kafka's retention is about to delete."""
        for partition, before in self.retention.endangered().items():
            self._abandon(partition, before, "expired", "retention is about to delete its records")

    def skip_stale_ranges(self) -> None:
        """Everything below the mark of the oldest version that may train is too old for certain. A
        partition whose position lies below that mark jumps to it, without decoding what lies
        between."""
        oldest = self._decisions.newest() - self._settings.max_age
        if oldest <= 0 or not self._judge.can_skip():
            return
        for partition in list(self._incarnation.assemblers):
            position = self._consumer.position(partition)
            horizon = self._incarnation.marks.stale_below(oldest, partition)
            if position is not None and position < horizon:
                self._skip(partition, position, horizon)

    def _skip(self, partition: int, position: int, horizon: int) -> None:
        """All open groups of the partition lie before the position, so all of them are too old."""
        decisions = self._decisions
        stale = [ready for ready in decisions.ready if ready.assignment.partition == partition]
        decisions.ready = [ready for ready in decisions.ready if ready not in stale]
        verdicts = decisions.verdicts
        verdicts.groups += [(ready, decisions.judge(ready.group)) for ready in stale]
        self._abandon(partition, position, "stale", "it lies in a range that is too old")
        decisions.settle(r for r, _ in verdicts.groups if r.assignment.partition == partition)
        done = [work for work in verdicts.all_works() if work.assignment.partition == partition]
        skipped = self._consumer.skip(partition, horizon, done)
        if skipped is not None:
            log.info(
                "skipped offsets %d to %d of partition %d: all of them are too old to train",
                skipped.first, skipped.end, partition,
            )  # fmt: skip
            verdicts.skipped.append(skipped)

    def _abandon(self, partition: int, before: int, verdict: Verdict, reason: str) -> None:
        """Decides open groups and trajectories that began before the offset, incomplete as they are."""
        assignment = self._consumer.assignment(partition)
        if assignment is None:
            return
        assembler = self._incarnation.assemblers[partition]
        groups, open_members = assembler.give_up(before, verdict, reason)
        verdicts = self._decisions.verdicts
        for group in groups:
            verdicts.groups.append((ReadyGroup(group, assignment), self._decisions.judge(group)))
        verdicts.others += open_members
        verdicts.assignments.append(assignment)
