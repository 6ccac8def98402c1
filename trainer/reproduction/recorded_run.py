"""A run as recorded in the ledger: which Decision made a version, and its batch, read from the log
again.

Nothing here needs torch, and nothing is written.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pool.connection import Connection
from pool.core.ledger import Ledger, group_id
from pool.readers.decision_batch import find_lost_groups, read_groups
from pool.readers.reader import read_records
from pool.topics import LEDGER
from schemas import DecidedGroup, Decision, Outcome
from servicekit.errors import Fatal, OffsetLost
from trainer.data.batch import Batch, make_batch, trained_groups
from trainer.data.digest import digest
from trainer.recorded_settings import RecordedSettings, decode_settings


@dataclass(frozen=True, slots=True)
class RebuiltBatch:
    """The batch of a version, rebuilt from the log."""

    decision: Decision
    settings: RecordedSettings
    outcome: Outcome | None
    """The result recorded after training, if there is one."""
    groups: list[DecidedGroup]
    lost: int
    """Number of decided groups that were deleted or given up before they were trained."""
    batch: Batch
    digest: str

    @property
    def is_same(self) -> bool | None:
        """Whether it is, bit for bit, the batch that was trained; None if no digest was recorded."""
        recorded = self.outcome.batch if self.outcome is not None else ""
        return recorded == self.digest if recorded else None


class RecordedRun:
    def __init__(self, connection: Connection, run: str) -> None:
        self._connection = connection
        self._codec = connection.codec()
        records = asyncio.run(read_records(connection, LEDGER, self._codec))
        self.ledger = Ledger(run, records)
        if not self.ledger.sequence:
            runs = {r.run for r in records if isinstance(r, Decision | Outcome)}
            names = ", ".join(sorted(runs)) or "none"
            raise Fatal(f"the ledger has no Decision of run {run}; runs in the ledger: {names}")

    def decisions_for(self, version: int, after: int | None = None) -> list[Decision]:
        """The Decisions that lead from version `after` to `version`; by default only the last of them.
        Checks that Kafka still has all of their records."""
        first = version - 1 if after is None else after
        decisions = [
            d for d in self.ledger.trained_after(first) if d.version and d.version <= version
        ]
        if len(decisions) < version - first:
            newest = max((d.version or 0 for d in self.ledger.trained_after(0)), default=0)
            known = {decision.version for decision in decisions}
            missing = next(v for v in range(first + 1, version + 1) if v not in known)
            raise Fatal(
                f"the ledger has no Decision that made version {missing} of run {self.ledger.run}; "
                f"its newest version is {newest}"
            )
        self._check_not_deleted(decisions)
        return decisions

    def rebuild_batch(self, decision: Decision) -> RebuiltBatch:
        withdrawn, settings = self.ledger.withdrawn_groups(), decode_settings(decision)
        groups = trained_groups(decision, withdrawn)
        read = read_groups(self._connection, self._codec, decision.topic, groups)
        batch = make_batch(decision, asyncio.run(read), settings.loss, settings.limits)
        return RebuiltBatch(
            decision=decision,
            settings=settings,
            outcome=self.ledger.outcome(decision.sequence),
            groups=groups,
            lost=batch.groups - len(groups),
            batch=batch,
            digest=digest(batch),
        )

    def _check_not_deleted(self, decisions: Sequence[Decision]) -> None:
        withdrawn, topic = self.ledger.withdrawn_groups(), decisions[0].topic
        groups = {group_id(g): g for d in decisions for g in trained_groups(d, withdrawn)}
        versions = {group_id(g): d.version for d in decisions for g in d.groups}
        if not groups:
            return
        deleted = asyncio.run(find_lost_groups(self._connection, topic, list(groups.values())))
        if deleted:
            raise OffsetLost(
                f"version {versions[group_id(deleted[0])]} of run {self.ledger.run} cannot be "
                f"reproduced: Kafka has deleted records of {len(deleted)} groups in "
                f"{self._connection.topic_name(topic)}, such as {deleted[0].prompt_uid} in partition "
                f"{deleted[0].partition}"
            )
