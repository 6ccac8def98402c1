"""What every rank does with a Decision: read its share from the log, train, save, restore."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from pool.connection import Connection
from pool.core.groups import Group
from pool.core.ledger import GroupId
from pool.readers.decision_batch import read_groups
from schemas import Decision
from servicekit import tracing
from servicekit.spans import Span
from trainer.checkpoint import Checkpoints
from trainer.data.batch import make_batch, shares
from trainer.data.decided import settings_of
from trainer.data.description import describe
from trainer.data.digest import digest
from trainer.learner import Learner


class Trained(NamedTuple):
    """What an Outcome tells of a training."""

    metrics: dict[str, float]
    batch: str
    """Its digest."""


MOST_TOLD = 1024
"""Trajectories of a batch that get a span of their own; the SDK's queue has room for twice as many."""


class Training:
    """The learner of this rank, and where it reads and saves."""

    def __init__(
        self,
        connection: Connection,
        learner: Learner,
        checkpoints: Checkpoints,
        about: dict[str, Any],
        probe: Callable[[str], None] = lambda stage: None,
        incarnation: int = 0,
    ) -> None:
        """`about` is what a checkpoint says of itself."""
        self.learner = learner
        self.version = 0
        self._connection = connection
        self._codec = connection.codec()
        self._checkpoints = checkpoints
        self._about = about
        self._probe = probe
        self._incarnation = incarnation

    def train(self, decision: Decision, lost: set[GroupId], trace: str | None = None) -> Trained:
        """Makes the Decision's version of the one before it, by the settings that it was made with.
        `trace` is rank 0's, for the others."""
        assert decision.version == self.version + 1, "versions are made one after the other"
        ranks = self.learner.ranks
        made_with = settings_of(decision)
        self.learner.adopt(made_with.learner, made_with.loss)
        share = shares(decision, lost, ranks.rank, ranks.world)
        groups = asyncio.run(read_groups(self._connection, self._codec, decision.topic, share))
        batch = make_batch(
            decision,
            groups,
            made_with.loss,
            made_with.limits,
            ranks.total,
            ranks.rank,
            ranks.world,
        )
        self._probe("before training")
        with self._span(decision, groups, trace) as span:
            found = describe(batch, ranks.total)
            if found["trajectories"]:
                found |= self.learner.step(batch)
        self.version = decision.version
        self._probe("trained")
        if tracing.is_enabled():
            self._tell_trajectories(decision, groups, span)
        return Trained(found, digest(batch, ranks.total))

    def _span(self, decision: Decision, groups: Sequence[Group], trace: str | None) -> Span:
        return tracing.span(
            "train",
            parent=trace,
            links=_traces(groups),
            rank=self.learner.ranks.rank,
            groups=len(groups),
            **self._about_version(decision),
        )

    def _tell_trajectories(self, decision: Decision, groups: Sequence[Group], span: Span) -> None:
        """A link leads from a version to its trajectories only. So each of their traces ends in a span
        that says which version was trained on it, and leads there."""
        for trace in _traces(groups)[:MOST_TOLD]:
            told = self._about_version(decision)
            tracing.span("trained", parent=trace, links=[span.traceparent], **told).end()

    def _about_version(self, decision: Decision) -> dict[str, Any]:
        return {
            "run": decision.run,
            "incarnation": self._incarnation,
            "version": decision.version,
            "sequence": decision.sequence,
        }

    def save(self) -> None:
        """Writes a checkpoint of the present version; rank 0 has the state of all."""
        state = self.learner.state()
        if self.learner.ranks.rank == 0:
            self._checkpoints.save(self.version, state, {"version": self.version, **self._about})

    def restore(self, below: float = math.inf) -> None:
        """Goes back to the newest checkpoint, if there is one, of a version below the given one."""
        earlier = [version for version in self._checkpoints.versions() if version < below]
        version = max(earlier, default=None)
        if version is not None:
            self.learner.load_state(self._checkpoints.load(version))
            self.version = version


def _traces(groups: Sequence[Group]) -> list[str]:
    """Of the members. Those that were posted together came with one."""
    members = [member for group in groups for member in group.members.values()]
    return list(dict.fromkeys(member.trace for member in members if member.trace))


class TrainOrder(msgspec.Struct):
    """What the other ranks need to train along."""

    decision: bytes
    lost: list[GroupId]
    trace: str = ""
