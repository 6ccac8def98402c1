"""What every rank does with a Decision: read its groups from the log, train, save and restore."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pool.connection import Connection
from pool.core.groups import Group
from pool.core.ledger import GroupId
from pool.readers.decision_batch import read_groups
from schemas import Decision
from servicekit import tracing
from servicekit.errors import Fatal
from servicekit.spans import Span
from trainer.checkpoints.folder import Checkpoints
from trainer.checkpoints.writer import CheckpointWriter
from trainer.data.batch import make_batch, trained_groups
from trainer.data.batch_metrics import batch_metrics
from trainer.data.digest import digest
from trainer.learner import Learner
from trainer.learner_state import restore_state, state_tensors
from trainer.machine import describe_machine
from trainer.model.packed_batch import PackedBatch
from trainer.recorded_settings import RecordedSettings, decode_settings


class PreparedBatch(NamedTuple):
    """A Decision with all that is needed to train it."""

    decision: Decision
    settings: RecordedSettings
    groups: list[Group]
    packed: PackedBatch
    digest: str


class TrainingResult(NamedTuple):
    """What an Outcome records about the training of a batch."""

    metrics: dict[str, float]
    batch: str
    """Digest of the batch."""
    machine: dict[str, Any]
    """The machine and the execution settings, as `describe_machine` returns them."""


MAX_TRAJECTORY_SPANS = 1024
"""Trajectories of a batch that get a span of their own; the SDK's queue has room for twice as many."""


class DecisionTraining:
    """The learner of this rank, where it reads its groups, and where it saves."""

    def __init__(
        self,
        connection: Connection,
        learner: Learner,
        checkpoints: Checkpoints,
        description: dict[str, Any],
        probe: Callable[[str], None] = lambda stage: None,
        incarnation: int = 0,
    ) -> None:
        """`description` is stored in every checkpoint: run, model and settings."""
        self.learner = learner
        self.version = 0
        self._connection = connection
        self._codec = connection.codec()
        self._checkpoints = checkpoints
        self._description = description
        self.writer = CheckpointWriter(checkpoints, learner.ranks, incarnation)
        self._probe = probe
        self._incarnation = incarnation

    def prepare(self, decision: Decision, withdrawn: set[GroupId]) -> PreparedBatch:
        """Reads the batch of a Decision from the log, without withdrawn groups, and packs it. May be
        called from any thread: it neither changes the learner nor talks to other ranks."""
        settings = decode_settings(decision)
        trained = trained_groups(decision, withdrawn)
        groups = asyncio.run(read_groups(self._connection, self._codec, decision.topic, trained))
        batch = make_batch(decision, groups, settings.loss, settings.limits)
        packed = self.learner.pack(batch, settings.loss)
        return PreparedBatch(decision, settings, groups, packed, digest(batch))

    def train(self, prepared: PreparedBatch, trace: str | None = None) -> TrainingResult:
        """Makes the Decision's version from the one before it, with the settings that the Decision
        records and the execution settings of this process. `trace` is rank 0's trace, for the other
        ranks."""
        decision, groups, batch = prepared.decision, prepared.groups, prepared.packed.batch
        assert decision.version == self.version + 1, "versions are made one after the other"
        self.learner.adopt(prepared.settings.learner, prepared.settings.loss)
        self.learner.packed = prepared.packed
        self._probe("before training")
        with self._span(decision, groups, trace) as span:
            metrics = batch_metrics(batch)
            if metrics["trajectories"]:
                metrics |= self.learner.step(batch)
                self._check_weights(decision)
        self.version, self.learner.packed = decision.version, None
        self._probe("trained")
        if tracing.is_enabled() and self.learner.ranks.rank == 0:
            self._link_trajectories(decision, groups, span)
        return TrainingResult(metrics, prepared.digest, describe_machine(self.learner))

    def _check_weights(self, decision: Decision) -> None:
        """Stops before anyone can get weights that are not finite."""
        if not self.learner.has_finite_weights():
            raise Fatal(
                f"training gave version {decision.version} weights that are NaN or infinite; they were "
                "neither sent nor saved. Training its batch again would give the same: start with "
                f"--give-up {decision.version} to make the version without it"
            )

    def _span(self, decision: Decision, groups: Sequence[Group], trace: str | None) -> Span:
        return tracing.span(
            "train",
            parent=trace,
            links=_traces(groups) if self.learner.ranks.rank == 0 else [],
            rank=self.learner.ranks.rank,
            groups=len(groups),
            **self._attributes(decision),
        )

    def _link_trajectories(self, decision: Decision, groups: Sequence[Group], span: Span) -> None:
        """Ends the trace of each trajectory with a span that links to the version trained on it. The
        links of the span `train` lead only the other way, from a version to its trajectories."""
        for trace in _traces(groups)[:MAX_TRAJECTORY_SPANS]:
            attributes = self._attributes(decision)
            tracing.span("trained", parent=trace, links=[span.traceparent], **attributes).end()

    def _attributes(self, decision: Decision) -> dict[str, Any]:
        return {
            "run": decision.run,
            "incarnation": self._incarnation,
            "version": decision.version,
            "sequence": decision.sequence,
        }

    def save(self) -> None:
        """Copies the present version and begins to write its checkpoint. All ranks take part; an
        earlier checkpoint is completed first."""
        description = {"version": self.version, **self._description}
        self.writer.start(self.version, state_tensors(self.learner), description)

    def restore(self, below: float = math.inf) -> None:
        """Loads the newest checkpoint of a version below the given one, if there is one."""
        earlier = [version for version in self._checkpoints.versions() if version < below]
        version = max(earlier, default=None)
        if version is not None:
            restore_state(self.learner, self._checkpoints.open(version))
            if not self.learner.has_finite_weights():
                raise Fatal(
                    f"checkpoint {self._checkpoints.path(version)} has weights that are NaN or "
                    "infinite; move it away to continue from the one before"
                )
            self.version = version

    def is_model_due(self) -> bool:
        """Whether the present version has been trained, but not been written as a Hugging Face
        folder."""
        return self.version not in (0, self._checkpoints.exported_version())

    def export_model(self) -> None:
        """Writes the present version as the run's Hugging Face folder. All ranks take part."""
        is_first = self.learner.ranks.rank == 0
        if is_first:
            self._checkpoints.clear_unfinished()
        unfinished = self._checkpoints.unfinished_model
        self.learner.export(self._description["model"], unfinished, torch.bfloat16)
        if is_first:
            self._checkpoints.complete_model(self.version, self._description["run"])


def _traces(groups: Sequence[Group]) -> list[str]:
    """Traces of the members, each once: members that were posted together share one."""
    members = [member for group in groups for member in group.members.values()]
    return list(dict.fromkeys(member.trace for member in members if member.trace))
