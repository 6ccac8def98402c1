"""What time, age and retention do to groups that wait, looked at while decisions are made."""

import logging

from schemas.records import Verdict
from trainer.deciding.decisions import Decisions
from trainer.deciding.judging import Judge
from trainer.deciding.retention import Retention
from trainer.deciding.settings import DecidingSettings
from trainer.deciding.waiting import Ready
from trainer.incarnation import Incarnation
from trainer.life import now_ms

log = logging.getLogger(__name__)


class Aging:
    def __init__(
        self,
        incarnation: Incarnation,
        settings: DecidingSettings,
        judge: Judge,
        decisions: Decisions,
    ) -> None:
        self.retention = Retention(incarnation)
        self._life = incarnation
        self._consumer = incarnation.consumer
        self._settings = settings
        self._judge = judge
        self._decisions = decisions

    def close_overdue(self) -> None:
        """Groups at their deadline are judged with the members that they have."""
        for partition, assembler in self._life.assemblers.items():
            assignment = self._consumer.assignment(partition)
            if assignment is not None:
                for group in assembler.overdue(now_ms()):
                    assembler.close(group)
                    self._decisions.admit(Ready(group, assignment))

    def expire_before_retention(self) -> None:
        for partition, before in self.retention.endangered().items():
            self._abandon(partition, before, "expired", "the log is about to delete it")

    def skip_what_is_stale(self) -> None:
        """Everything below the mark of the oldest version that may train is too old for certain. Where
        reading has not come so far, it goes on there, without decoding what lies between."""
        oldest = self._decisions.newest() - self._settings.max_age
        if oldest <= 0 or not self._judge.skips():
            return
        for partition in list(self._life.assemblers):
            position = self._consumer.position(partition)
            horizon = self._life.marks.stale_below(oldest, partition)
            if position is not None and position < horizon:
                self._skip(partition, position, horizon)

    def _skip(self, partition: int, position: int, horizon: int) -> None:
        """All that is open lies before the position, so all of it is too old."""
        decisions = self._decisions
        here = [ready for ready in decisions.ready if ready.assignment.partition == partition]
        decisions.ready = [ready for ready in decisions.ready if ready not in here]
        verdicts = decisions.verdicts
        verdicts.groups += [(ready, decisions.judged(ready.group)) for ready in here]
        self._abandon(partition, position, "stale", "it lies in a range that is too old")
        decisions.settle(r for r, _ in verdicts.groups if r.assignment.partition == partition)
        done = [work for work in verdicts.all_works() if work.assignment.partition == partition]
        skipped = self._consumer.skip(partition, horizon, done)
        if skipped is not None:
            log.info("skipped %d..%d of %d: too old", skipped.first, skipped.end, partition)
            verdicts.skipped.append(skipped)

    def _abandon(self, partition: int, before: int, verdict: Verdict, reason: str) -> None:
        """Decides what is open and began before the offset, as it is."""
        assignment = self._consumer.assignment(partition)
        if assignment is None:
            return
        groups, unended = self._life.assemblers[partition].give_up(before, verdict, reason)
        verdicts = self._decisions.verdicts
        for group in groups:
            verdicts.groups.append((Ready(group, assignment), self._decisions.judged(group)))
        verdicts.others += unended
        verdicts.assignments.append(assignment)
