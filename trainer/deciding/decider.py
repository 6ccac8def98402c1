"""Deciding in a live run: what trains next, and what became of everything else.

It never stops reading while a batch is trained, so the lag that operators see is true, gateways hear
of decided groups, and nothing piles up in the client.
"""

import time
from collections.abc import Callable
from typing import Any

from trainer.deciding.aging import Aging
from trainer.deciding.decisions import Decisions
from trainer.deciding.judging import Judge
from trainer.deciding.settings import DecidingSettings
from trainer.deciding.showing import show_state
from trainer.deciding.thread import DecidingThread
from trainer.incarnation import Incarnation

POLL = 0.02
"""Seconds to wait for records: as long may a question of the loop wait."""
COMMIT_EVERY = 1.0
VERDICTS_EVERY = 10.0
"""Seconds after which verdicts are written although nothing is trained."""
MANY = 1_000
"""Verdicts that are written before their time: a Decision must fit into a message."""


class Decider(DecidingThread):
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
        decisions = Decisions(incarnation, settings, judge, describe)
        super().__init__(incarnation, decisions, probe)
        self._incarnation = incarnation
        self._aging = Aging(incarnation, settings, judge, decisions)
        self._verdicts_every = verdicts_every
        self._verdicts_at = self._committed_at = time.monotonic()

    def checkpoint_is_due(self) -> bool:
        return self._aging.retention.checkpoint_is_due

    def saved(self, version: int) -> None:
        self._aging.retention.saved_version = version
        super().saved(version)

    def _turn(self) -> None:
        self._answer()
        for work in self._consumer.poll(POLL):
            self._decisions.take(work)
        self._decisions.drop_lost_partitions()
        if self._decisions.version is not None:
            self._decide()
        if time.monotonic() - self._committed_at >= COMMIT_EVERY and self._consumer.commit():
            self._progressed()

    def _decide(self) -> None:
        if self._wanted is not None:
            self._give(self._wanted, self._decisions.try_batch())
        self._aging.skip_what_is_stale()
        is_due = time.monotonic() - self._verdicts_at >= self._verdicts_every
        if is_due:
            self._aging.close_overdue()
            self._aging.expire_before_retention()
            show_state(self._incarnation)
            self._verdicts_at = time.monotonic()
        verdicts = self._decisions.verdicts
        if verdicts and (is_due or verdicts.skipped or len(verdicts.others) > MANY):
            self._decisions.write_verdicts()
            self._progressed()

    def _leave(self) -> None:
        if self._decisions.verdicts:
            self._decisions.write_verdicts()

    def _progressed(self) -> None:
        super()._progressed()
        self._committed_at = time.monotonic()
