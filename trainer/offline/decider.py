"""Deciding in an offline run. It reads only while a batch is asked for, up to the record that completes
it, so that what is decided depends on the records and on nothing else."""

import time
from collections.abc import Callable
from concurrent.futures import Future

from pool.core.groups import Group
from schemas import Decision
from trainer.deciding.decisions import Decisions
from trainer.deciding.thread import DecidingThread, RangeEnded
from trainer.deciding.waiting import Ready
from trainer.offline.life import OfflineLife

POLL = 0.02
"""Seconds of reading after which the loop's questions are answered."""
MANY = 5_000
"""Trajectories with a verdict that are written without a batch: a Decision must fit into a message."""


class OfflineDecider(DecidingThread):
    def __init__(
        self,
        life: OfflineLife,
        decisions: Decisions,
        probe: Callable[[str], None] = lambda stage: None,
    ) -> None:
        super().__init__(life, decisions, probe)
        self._source = life.consumer
        self._assemblers = life.assemblers

    def read(self) -> tuple[int, int]:
        return self._source.read()

    def _turn(self) -> None:
        self._answer()
        if self._wanted is None:
            self._stopping.wait(POLL)
            return
        for work in self._source.poll(POLL):
            self._decisions.take(work)
            self._decide(self._wanted)
        self.last_progress = time.monotonic()  # reading is what it has to do, whatever comes of it
        if self._wanted is not None and self._source.is_over:
            self._end(self._wanted)

    def _leave(self) -> None:
        """It has none: what is undecided is read again from where the last Decision stands."""

    def _decide(self, wanted: "Future[Decision]") -> None:
        self._give(wanted, self._decisions.try_batch())
        verdicts = self._decisions.verdicts
        if len(verdicts.others) + sum(len(d.members) for _, d in verdicts.groups) >= MANY:
            self._decisions.write_verdicts()
            self._progressed()

    def _end(self, wanted: "Future[Decision]") -> None:
        """Groups that are open when the range ends are closed with the members that they have, one by
        one, and the last batch may be smaller than the others."""
        group = self._next_open()
        if group is not None:
            self._assemblers[group.partition].close(group)
            self._decisions.admit(Ready(group, self._source.assignment(group.partition)))
            self._decide(wanted)
            return
        self._give(wanted, self._decisions.try_rest())
        if self._wanted is not None:
            if self._decisions.verdicts:
                self._decisions.write_verdicts()
            self._wanted = None
            wanted.set_exception(RangeEnded())

    def _next_open(self) -> Group | None:
        groups = [g for assembler in self._assemblers.values() for g in assembler.open_groups()]
        return min(groups, key=lambda group: (group.partition, group.first_offset), default=None)
