"""Offloading saves memory and changes no result."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.trainer.model import small
from tests.trainer.saved import save
from trainer.algorithm.settings import LossSettings
from trainer.checkpoints.folder import Checkpoints
from trainer.learner import Learner
from trainer.learner_state import restore_state
from trainer.model import offload
from trainer.model.offload import LayerInputs
from trainer.model.settings import ExecutionSettings, LearnerSettings

CPU = torch.device("cpu")
RECOMPUTED = {"tokens_per_pack": 64, "gradient_checkpointing": True}


def learner(**execution: Any) -> Learner:
    settings = LearnerSettings(learning_rate=1e-2, weight_decay=0.1)
    return Learner(
        small.model(), settings, LossSettings(), ExecutionSettings(**execution), device=CPU
    )


def weights(made: Learner) -> list[Any]:
    return [weight.detach() for weight in made.trained.parameters.values()]


def assert_equal(one: Learner, other: Learner) -> None:
    assert all(map(torch.equal, weights(one), weights(other)))


class Transfers:
    """Counts what goes to CPU memory and comes back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stored: list[tuple[int, ...]] = []
        self.fetched = 0
        store, fetch = LayerInputs._store, LayerInputs._fetch

        def counting_store(inputs: LayerInputs, tensor: Any) -> Any:
            self.stored.append(tuple(tensor.shape))
            return store(inputs, tensor)

        def counting_fetch(inputs: LayerInputs, stored: Any) -> None:
            self.fetched += stored.loaded is None
            fetch(inputs, stored)

        monkeypatch.setattr(LayerInputs, "_store", counting_store)
        monkeypatch.setattr(LayerInputs, "_fetch", counting_fetch)


def test_the_inputs_of_layers_go_to_cpu_memory_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transfers = Transfers(monkeypatch)
    plain, offloaded = learner(**RECOMPUTED), learner(**RECOMPUTED, offload_activations=True)
    transfers.stored.clear()  # those of the search for an execution mode
    transfers.fetched = 0
    metrics = offloaded.step(small.batch())
    plain.step(small.batch())
    assert_equal(plain, offloaded)
    layers, width = len(plain.model.layers), plain.model.causal.config.hidden_size
    assert len(transfers.stored) == layers * metrics["packs"]
    assert {(shape[0], shape[-1]) for shape in transfers.stored} == {(1, width)}
    assert transfers.fetched == len(transfers.stored), "each comes back once"


def test_inputs_are_forgotten_after_the_backward_pass() -> None:
    made = learner(**RECOMPUTED, offload_activations=True)
    made.step(small.batch())
    run_layer = made.model.layers[0]._gradient_checkpointing_func
    assert run_layer.__self__._last() is None


def test_the_optimiser_takes_the_same_steps_some_weights_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "CHUNK_BYTES", 20_000)
    plain, offloaded = learner(), learner(offload_optimiser=True)
    assert len(list(offload._chunks(weights(plain)))) > 3
    for seed in range(3):
        plain.step(small.batch(seed=seed))
        offloaded.step(small.batch(seed=seed))
    assert_equal(plain, offloaded)


def test_an_offloaded_optimiser_continues_from_a_checkpoint(tmp_path: Path) -> None:
    """Also from one that was saved without offloading."""
    first = learner()
    first.step(small.batch())
    saved = save(Checkpoints(tmp_path, "run", keep=1), 1, first)
    again = learner(offload_optimiser=True)
    restore_state(again, Checkpoints(tmp_path, "run", keep=1).open(1))
    assert saved.exists()
    for made in (first, again):
        made.step(small.batch(seed=1))
    assert_equal(first, again)


def test_only_recomputed_layers_have_inputs_to_offload() -> None:
    with pytest.raises(ValidationError, match="offload_activations needs gradient_checkpointing"):
        ExecutionSettings(offload_activations=True)
