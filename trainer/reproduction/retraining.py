"""Trains a version again, in memory: from the newest checkpoint before it, or from the initial model.

It uses the same DecisionTraining as a live run. Nothing is written to the log or to the folder of
checkpoints.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from schemas import Decision, Outcome
from servicekit.errors import Fatal
from trainer.checkpoints.folder import Checkpoints
from trainer.learner import Learner
from trainer.learner_state import weight_key
from trainer.machine import describe_machine, is_bit_exact
from trainer.model.settings import ExecutionSettings, LearnerSettings
from trainer.recorded_settings import decode_execution, decode_settings, initial_seed
from trainer.reproduction.comparison import MetricComparison, compare_metrics
from trainer.reproduction.recorded_run import RebuiltBatch, RecordedRun
from trainer.reproduction.settings import ReplayStepSettings
from trainer.training import DecisionTraining

BUILD_SETTINGS = ("lora_rank", "lora_alpha", "lora_targets", "dtype", "fp32_head")
"""Settings that a model is built with; they cannot change afterwards."""


@dataclass(frozen=True, slots=True)
class Retrained:
    """The result of training a version again."""

    start: int
    """The version it started from: that of a checkpoint, or 0 for the initial model."""
    metrics: list[MetricComparison]
    tolerance: float
    """0 where this machine should give the same bits."""
    machine: dict[str, Any]
    differing_weights: int | None
    """Number of tensors that differ from the checkpoint of this version; None if it has none."""

    @property
    def is_same(self) -> bool:
        is_exact = not self.tolerance
        return all(metric.is_within(self.tolerance) for metric in self.metrics) and not (
            is_exact and self.differing_weights
        )


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """The state that training again starts from."""

    version: int
    model: Path
    checkpoints: Checkpoints
    saved_versions: list[int]
    """Versions that have a checkpoint."""
    description: dict[str, Any]
    """The description stored in the checkpoint; empty for the initial model."""


def retrain(settings: ReplayStepSettings, run: RecordedRun, batch: RebuiltBatch) -> Retrained:
    outcome = batch.outcome
    _check_possible(settings, outcome)
    start = _find_start(settings)
    decisions = run.decisions_for(settings.version, after=start.version)
    recorded_machine = json.loads(outcome.machine) if outcome is not None else {}
    threads = settings.threads or recorded_machine.get("threads")
    if threads is not None:
        torch.set_num_threads(threads)
    training = _make_training(settings, start, decisions, decode_execution(batch.decision, outcome))
    withdrawn = run.ledger.withdrawn_groups()
    console = Console(stderr=True)
    for decision in track(
        decisions,
        "training again",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ):
        recorded_outcome = run.ledger.outcome(decision.sequence)
        training.learner.execution = decode_execution(decision, recorded_outcome)
        result = training.train(training.prepare(decision, withdrawn))
    if settings.into is not None:
        training.learner.export(start.model, settings.into, torch.float32)
    return _compare(settings, outcome, start, training.learner, result.metrics)


def _check_possible(settings: ReplayStepSettings, outcome: Outcome | None) -> None:
    """Refuses before anything is trained, if the result could not be compared or written."""
    if outcome is None and settings.into is None:
        raise Fatal(
            f"version {settings.version} of run {settings.run} has no Outcome in the ledger to compare "
            "with; leave out --checkpoints and --model to show its batch only"
        )
    if settings.into is not None and settings.into.exists() and any(settings.into.iterdir()):
        raise Fatal(f"{settings.into} is not empty; choose another folder with --into")


def _find_start(settings: ReplayStepSettings) -> StartingPoint:
    checkpoints = Checkpoints(settings.checkpoints or Path(), settings.run, keep=1)
    saved = checkpoints.versions() if settings.checkpoints is not None else []
    version = max((version for version in saved if version < settings.version), default=0)
    description = checkpoints.description(version) if version else {}
    model = settings.model or (Path(description["model"]) if "model" in description else None)
    if model is None:
        raise Fatal(
            f"{checkpoints.folder} has no checkpoint below version {settings.version}; "
            "set --model to the folder that the run started from"
        )
    if not (model / "config.json").is_file():
        raise Fatal(f"model {model} is not a Hugging Face folder: it has no config.json")
    return StartingPoint(version, model, checkpoints, saved, description)


def _make_training(
    settings: ReplayStepSettings,
    start: StartingPoint,
    decisions: Sequence[Decision],
    execution: ExecutionSettings,
) -> DecisionTraining:
    recorded = [decode_settings(decision) for decision in decisions]
    learner_settings = [each.learner for each in recorded]
    if "learner" in start.description:
        learner_settings.append(LearnerSettings.from_record(start.description["learner"]))
    for name in BUILD_SETTINGS:
        if len({str(getattr(each, name)) for each in learner_settings}) > 1:
            raise Fatal(
                f"{name} was changed between version {start.version} and {settings.version}, and the "
                "model is built with it; a checkpoint of a version after the change is needed"
            )
    losses = [each.loss for each in recorded]
    loss = next((loss for loss in losses if loss.needs_reference), losses[0])
    torch.manual_seed(initial_seed(decisions[0]))
    learner = Learner.from_folder(start.model, learner_settings[0], loss, execution)
    training = DecisionTraining(settings, learner, start.checkpoints, {})
    if start.version:
        training.restore(settings.version)
    return training


def _compare(
    settings: ReplayStepSettings,
    outcome: Outcome | None,
    start: StartingPoint,
    learner: Learner,
    metrics: dict[str, float],
) -> Retrained:
    machine = describe_machine(learner)
    should_be_exact = (
        outcome is not None
        # Optimizer steps before the one that ran out of memory had larger packs.
        and not outcome.metrics.get("out_of_memory")
        and is_bit_exact(outcome.machine, machine, learner.settings.deterministic)
    )
    is_saved = settings.version in start.saved_versions
    return Retrained(
        start=start.version,
        metrics=compare_metrics(outcome.metrics, metrics) if outcome is not None else [],
        tolerance=0.0 if should_be_exact else settings.tolerance,
        machine=machine,
        differing_weights=_differing_weights(learner, start, settings.version)
        if is_saved
        else None,
    )


def _differing_weights(learner: Learner, start: StartingPoint, version: int) -> int:
    saved = start.checkpoints.open(version)
    ours = {weight_key(name): weight for name, weight in learner.trained.parameters.items()}
    return sum(
        key not in saved.shapes or not saved.read(key).equal(weight.detach().cpu())
        for key, weight in ours.items()
    )
