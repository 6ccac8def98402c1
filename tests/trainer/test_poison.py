"""Batches with numbers that would spoil every weight."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pool.connection import Connection
from servicekit.errors import Fatal
from tests.trainer.model import small
from tests.trainer.saved import save
from tests.trainer.test_learner import learner, weights_of
from trainer.algorithm.settings import LossSettings
from trainer.checkpoints.folder import Checkpoints
from trainer.data.batch import Batch
from trainer.learner import Learner
from trainer.training import DecisionTraining


def with_behaviour(batch: Batch, value: float) -> Batch:
    """The logprob of one token is another."""
    row = batch.samples[0].rows[0]
    behaviour = row.behaviour.copy()
    behaviour[np.flatnonzero(row.trainable)[0]] = value
    rows = (replace(row, behaviour=behaviour), *batch.samples[0].rows[1:])
    return replace(batch, samples=[replace(batch.samples[0], rows=rows), *batch.samples[1:]])


def with_advantage(batch: Batch, value: float) -> Batch:
    return replace(batch, advantages=[value, *batch.advantages[1:]])


@pytest.mark.parametrize("value", [-3e38, 3e38])
@pytest.mark.parametrize("loss", ["dppo_tv", "kpop", "ppo_clip", "cispo", "icepop", "gspo"])
def test_no_logprob_makes_a_gradient_that_is_not_finite(loss: str, value: float) -> None:
    aggregation = "rollout_mean" if loss == "gspo" else "token_mean"
    made = learner(loss=LossSettings.model_validate({"loss": loss, "aggregation": aggregation}))
    metrics = made.step(with_behaviour(small.batch(), value))
    assert metrics["skipped_steps"] == 0
    assert 0 < metrics["grad_norm"] < 100
    assert made.has_finite_weights()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float) -> None:
    made, undisturbed = learner(warmup=3), learner(warmup=3)
    metrics = made.step(with_advantage(small.batch(), value))
    assert metrics["skipped_steps"] == 1
    assert not math.isfinite(metrics["grad_norm"])
    assert torch.equal(weights_of(made), weights_of(undisturbed))
    for each in (made, undisturbed):
        assert each.step(small.batch())["skipped_steps"] == 0
    assert torch.equal(weights_of(made), weights_of(undisturbed))


def test_of_several_optimiser_steps_only_the_poisoned_one_is_skipped() -> None:
    made = learner(loss=LossSettings(loss="ppo_clip", optimiser_steps=2))
    before = weights_of(made).clone()
    metrics = made.step(with_advantage(small.batch(), math.nan))
    assert (metrics["skipped_steps"], made.steps) == (1, 1)
    assert math.isfinite(metrics["grad_norm"])
    assert not torch.equal(weights_of(made), before)


def spoil(made: Learner) -> None:
    with torch.no_grad():
        next(iter(made.trained.parameters.values()))[0] = math.nan


def test_weights_that_are_not_finite_are_noticed() -> None:
    made = learner()
    assert made.has_finite_weights()
    spoil(made)
    assert not made.has_finite_weights()


def test_a_checkpoint_with_such_weights_is_not_continued_from(tmp_path: Path) -> None:
    made = learner()
    checkpoints = Checkpoints(tmp_path, "run", keep=3)
    spoil(made)
    save(checkpoints, 7, made)
    training = DecisionTraining(Connection(), learner(), checkpoints, {})
    with pytest.raises(Fatal, match="00000007 has weights that are NaN or infinite; move it away"):
        training.restore()
