"""The decider of an offline run.

It reads only while a batch is requested, and only up to the record that completes it. What it decides
therefore depends on the records alone.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future

from pool.core.groups import Group
from schemas import Decision
from trainer.decisions.decider import Decider, RangeEnded
from trainer.decisions.maker import DecisionMaker
from trainer.decisions.pending import ReadyGroup
from trainer.offline.incarnation import OfflineIncarnation

POLL_S = 0.02
"""Seconds of reading, after which calls submitted by the loop are run."""
MAX_VERDICTS = 5_000
"""Trajectories whose verdicts are written without a batch: a Decision must fit into one message."""


class OfflineDecider(Decider):
    def __init__(
        self,
        incarnation: OfflineIncarnation,
        decisions: DecisionMaker,
        probe: Callable[[str], None] = lambda stage: None,
    ) -> None:
        super().__init__(incarnation, decisions, probe)
        self._source = incarnation.consumer
        self._assemblers = incarnation.assemblers

    def range_progress(self) -> tuple[int, int]:
        return self._source.range_progress()

    def _turn(self) -> None:
        self._run_calls()
        if self._batch is None:
            self._stopping.wait(POLL_S)
            return
        for work in self._source.poll(POLL_S):
            self._decisions.take(work)
            self._decide(self._batch)
        self.last_progress = time.monotonic()  # reading counts as progress, even without a result
        if self._batch is not None and self._source.is_exhausted:
            self._decide_rest(self._batch)

    def _finish(self) -> None:
        """Writes nothing: what is undecided is read again from where the last Decision stands."""

    def _decide(self, batch: "Future[Decision]") -> None:
        self._deliver(batch, self._decisions.try_batch())
        verdicts = self._decisions.verdicts
        if len(verdicts.others) + sum(len(d.members) for _, d in verdicts.groups) >= MAX_VERDICTS:
            self._decisions.write_verdicts()
            self._note_progress()

    def _decide_rest(self, batch: "Future[Decision]") -> None:
        """Closes the groups that are open when the range ends, one by one, with the members that they
        have. The last batch may be smaller than the others."""
        group = self._next_open()
        if group is not None:
            self._assemblers[group.partition].close(group)
            self._decisions.admit(ReadyGroup(group, self._source.assignment(group.partition)))
            self._decide(batch)
            return
        self._deliver(batch, self._decisions.try_rest())
        if self._batch is not None:
            if self._decisions.verdicts:
                self._decisions.write_verdicts()
            self._batch = None
            batch.set_exception(RangeEnded())

    def _next_open(self) -> Group | None:
        groups = [g for assembler in self._assemblers.values() for g in assembler.open_groups()]
        return min(groups, key=lambda group: (group.partition, group.first_offset), default=None)
