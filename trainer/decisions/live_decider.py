"""The decider of a live run.

It keeps reading while a batch is trained, so the lag that operators see is true, gateways learn of
decided groups, and nothing piles up in the client.
"""

import time
from collections.abc import Callable
from typing import Any

from trainer.decisions.decider import Decider
from trainer.decisions.expiry import GroupExpiry
from trainer.decisions.gauges import update_gauges
from trainer.decisions.judge import Judge
from trainer.decisions.maker import DecisionMaker
from trainer.decisions.minimum_shares import MinimumShares
from trainer.decisions.settings import DecisionSettings
from trainer.incarnation.live import LiveIncarnation

POLL_S = 0.02
"""Seconds to wait for records, and so the longest wait of a call that the loop submits."""
COMMIT_EVERY_S = 1.0
VERDICTS_EVERY_S = 10.0
"""Seconds after which verdicts are written even if no batch is trained."""
MAX_VERDICTS = 1_000
"""Verdicts that are written at once without waiting: a Decision must fit into one message."""


class LiveDecider(Decider):
    """`describe` returns what a Decision records about the training of its batch."""

    def __init__(
        self,
        incarnation: LiveIncarnation,
        settings: DecisionSettings,
        judge: Judge,
        describe: Callable[[int], dict[str, Any]],
        probe: Callable[[str], None] = lambda stage: None,
        verdicts_every: float = VERDICTS_EVERY_S,
    ) -> None:
        minimums = MinimumShares(settings.min_share_wait_s)
        decisions = DecisionMaker(incarnation, settings, judge, describe, minimums)
        super().__init__(incarnation, decisions, probe)
        self._live_incarnation = incarnation
        self._expiry = GroupExpiry(incarnation, settings, judge, decisions)
        self._verdicts_every = verdicts_every
        self._verdicts_at = self._committed_at = time.monotonic()

    def checkpoint_is_due(self) -> bool:
        return self._expiry.retention.checkpoint_is_due

    def note_checkpoint(self, version: int) -> None:
        self._expiry.retention.saved_version = version
        super().note_checkpoint(version)

    def _turn(self) -> None:
        self._run_calls()
        for work in self._consumer.poll(POLL_S):
            self._decisions.take(work)
        self._decisions.drop_lost_partitions()
        if self._decisions.version is not None:
            self._decide()
        if time.monotonic() - self._committed_at >= COMMIT_EVERY_S and self._consumer.commit():
            self._note_progress()

    def _decide(self) -> None:
        if self._batch is not None:
            self._deliver(self._batch, self._decisions.try_batch())
        self._expiry.skip_stale_ranges()
        is_due = time.monotonic() - self._verdicts_at >= self._verdicts_every
        if is_due:
            self._expiry.close_overdue()
            self._expiry.expire_before_retention()
            update_gauges(self._live_incarnation)
            self._verdicts_at = time.monotonic()
        verdicts = self._decisions.verdicts
        if verdicts and (is_due or verdicts.skipped or len(verdicts.others) > MAX_VERDICTS):
            self._decisions.write_verdicts()
            self._note_progress()

    def _finish(self) -> None:
        if self._decisions.verdicts:
            self._decisions.write_verdicts()

    def _note_progress(self) -> None:
        super()._note_progress()
        self._committed_at = time.monotonic()
