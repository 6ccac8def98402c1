"""A version is trained again, in memory: from the newest checkpoint before it, or from the model.

The same Training does it that trains live. Neither the log nor the folder of checkpoints is written
to.
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
from trainer.checkpoint import ABOUT, Checkpoints
from trainer.data.decided import first_seed, settings_of
from trainer.learner import Learner
from trainer.machine import gives_the_same_bits, machine
from trainer.model.settings import LearnerSettings
from trainer.replaying.comparing import Compared, compare
from trainer.replaying.past import Past, Rebuilt
from trainer.replaying.settings import ReplayStepSettings
from trainer.training import Training

BUILT = ("lora_rank", "lora_alpha", "lora_targets", "dtype", "fp32_head")
"""Settings that a model is built with, and that nothing changes afterwards."""


@dataclass(frozen=True, slots=True)
class Again:
    """What came out."""

    began: int
    """The version that it began with: a checkpoint, or 0 for the model itself."""
    compared: list[Compared]
    tolerance: float
    """0: this is a machine that gives the same bits."""
    machine: dict[str, Any]
    other_weights: int | None
    """Tensors that differ from the checkpoint of this very version; None: there is none."""

    @property
    def same(self) -> bool:
        exact = not self.tolerance
        return all(one.is_within(self.tolerance) for one in self.compared) and not (
            exact and self.other_weights
        )


@dataclass(frozen=True, slots=True)
class Start:
    """Where the way to a version begins."""

    version: int
    model: Path
    checkpoints: Checkpoints
    kept: list[int]
    """Versions that have a checkpoint."""
    about: dict[str, Any]
    """What the checkpoint says of itself."""


def train_again(settings: ReplayStepSettings, past: Past, rebuilt: Rebuilt) -> Again:
    _check(settings, rebuilt.outcome)
    start = _start(settings)
    chain = past.making(settings.version, after=start.version)
    recorded = json.loads(rebuilt.outcome.machine) if rebuilt.outcome is not None else {}
    threads = settings.threads or recorded.get("threads")
    if threads is not None:
        torch.set_num_threads(threads)
    training = _training(settings, start, chain)
    lost = past.ledger.lost_groups()
    console = Console(stderr=True)
    for decision in track(
        chain, "training again", console=console, transient=True, disable=not console.is_terminal
    ):
        trained = training.train(decision, lost)
    if settings.into is not None:
        training.learner.export(start.model, settings.into, torch.float32)
    return _judged(settings, rebuilt.outcome, start, training.learner, trained.metrics)


def _check(settings: ReplayStepSettings, outcome: Outcome | None) -> None:
    """What would be in vain is known before anything is trained."""
    if outcome is None and settings.into is None:
        raise Fatal(
            f"version {settings.version} of run {settings.run} has no Outcome in the ledger, so "
            "nothing says what its loss was; without --checkpoints and --model its batch is shown"
        )
    if settings.into is not None and settings.into.exists() and any(settings.into.iterdir()):
        raise Fatal(f"{settings.into} is not empty; choose another --into")


def _start(settings: ReplayStepSettings) -> Start:
    checkpoints = Checkpoints(settings.checkpoints or Path(), settings.run, keep=1)
    kept = checkpoints.versions() if settings.checkpoints is not None else []
    version = max((version for version in kept if version < settings.version), default=0)
    about = {}
    if version:
        about = json.loads((checkpoints.place(version) / ABOUT).read_text())
    model = settings.model or (Path(about["model"]) if "model" in about else None)
    if model is None:
        raise Fatal(
            f"{checkpoints.folder} has no checkpoint below version {settings.version}; "
            "give --model too, the folder that the run started from"
        )
    if not (model / "config.json").is_file():
        raise Fatal(f"model {model} is no Hugging Face folder: it has no config.json")
    return Start(version, model, checkpoints, kept, about)


def _training(settings: ReplayStepSettings, start: Start, chain: Sequence[Decision]) -> Training:
    made_with = [settings_of(decision) for decision in chain]
    learning = [one.learner for one in made_with]
    if "learner" in start.about:
        learning.append(LearnerSettings.model_validate(start.about["learner"]))
    for name in BUILT:
        if len({str(getattr(one, name)) for one in learning}) > 1:
            raise Fatal(
                f"{name} was changed between version {start.version} and {settings.version}, and a "
                "model is built with it; a checkpoint between the two is needed"
            )
    needing = [one.loss for one in made_with if one.loss.needs_reference]
    torch.manual_seed(first_seed(chain[0]))
    learner = Learner.from_folder(start.model, learning[0], (needing or [made_with[0].loss])[0])
    training = Training(settings, learner, start.checkpoints, {})
    if start.version:
        _restore(training, settings.version, start)
    return training


def _restore(training: Training, below: int, start: Start) -> None:
    try:
        training.restore(below)
    except (KeyError, RuntimeError) as error:
        place = start.checkpoints.place(start.version)
        raise Fatal(f"checkpoint {place} is not of the model in {start.model}") from error


def _judged(
    settings: ReplayStepSettings,
    outcome: Outcome | None,
    start: Start,
    learner: Learner,
    metrics: dict[str, float],
) -> Again:
    here = machine(learner)
    exact = outcome is not None and gives_the_same_bits(
        outcome.machine, here, learner.settings.deterministic
    )
    saved = settings.version in start.kept
    return Again(
        began=start.version,
        compared=compare(outcome.metrics, metrics) if outcome is not None else [],
        tolerance=0.0 if exact else settings.tolerance,
        machine=here,
        other_weights=_other_weights(learner, start, settings.version) if saved else None,
    )


def _other_weights(learner: Learner, start: Start, version: int) -> int:
    saved, ours = start.checkpoints.load(version), learner.state()
    return sum(
        name not in saved or not saved[name].equal(tensor)
        for name, tensor in ours.items()
        if name.startswith("weight.")
    )
