"""A run's past, as the ledger tells it: which Decision made a version, and its batch, read again.

Nothing here needs torch, and nothing writes.
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
from trainer.data.batch import Batch, make_batch, shares
from trainer.data.decided import Decided, settings_of
from trainer.data.digest import digest


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The batch of a version, as it is read today."""

    decision: Decision
    made_with: Decided
    outcome: Outcome | None
    """What was written down when it had been trained."""
    groups: list[DecidedGroup]
    lost: int
    """Groups that were decided, and that the log had deleted before they were trained."""
    batch: Batch
    digest: str

    @property
    def same(self) -> bool | None:
        """Whether this is, bit for bit, what was trained; None: nobody wrote down what was."""
        recorded = self.outcome.batch if self.outcome is not None else ""
        return recorded == self.digest if recorded else None


class Past:
    def __init__(self, connection: Connection, run: str) -> None:
        self._connection = connection
        self._codec = connection.codec()
        records = asyncio.run(read_records(connection, LEDGER, self._codec))
        self.ledger = Ledger(run, records)
        if not self.ledger.sequence:
            runs = {r.run for r in records if isinstance(r, Decision | Outcome)}
            there = ", ".join(sorted(runs)) or "none"
            raise Fatal(f"the ledger has no Decision of run {run}; it has those of: {there}")

    def making(self, version: int, after: int | None = None) -> list[Decision]:
        """The Decisions that lead from the version `after` to `version`, the last of them alone
        unless it is given; their records are all there."""
        first = version - 1 if after is None else after
        found = [d for d in self.ledger.trained_after(first) if d.version and d.version <= version]
        if len(found) < version - first:
            newest = max((d.version or 0 for d in self.ledger.trained_after(0)), default=0)
            have = {decision.version for decision in found}
            missing = next(v for v in range(first + 1, version + 1) if v not in have)
            raise Fatal(
                f"the ledger has no Decision that made version {missing} of run {self.ledger.run}; "
                f"the newest version that it knows is {newest}"
            )
        self._check_kept(found)
        return found

    def rebuild(self, decision: Decision) -> Rebuilt:
        lost, made_with = self.ledger.lost_groups(), settings_of(decision)
        groups = shares(decision, lost, 0, 1)
        read = read_groups(self._connection, self._codec, decision.topic, groups)
        batch = make_batch(decision, asyncio.run(read), made_with.loss, made_with.limits)
        return Rebuilt(
            decision=decision,
            made_with=made_with,
            outcome=self.ledger.outcome(decision.sequence),
            groups=groups,
            lost=batch.groups - len(groups),
            batch=batch,
            digest=digest(batch),
        )

    def _check_kept(self, decisions: Sequence[Decision]) -> None:
        lost, topic = self.ledger.lost_groups(), decisions[0].topic
        groups = {group_id(g): g for d in decisions for g in shares(d, lost, 0, 1)}
        versions = {group_id(g): d.version for d in decisions for g in d.groups}
        if not groups:
            return
        gone = asyncio.run(find_lost_groups(self._connection, topic, list(groups.values())))
        if gone:
            raise OffsetLost(
                f"version {versions[group_id(gone[0])]} of run {self.ledger.run} cannot be made "
                f"again: {self._connection.topic_name(topic)} has deleted records of {len(gone)} "
                f"groups, such as {gone[0].prompt_uid} in partition {gone[0].partition}"
            )
