"""Checkpoints are there whole or not at all, and training goes on while they are written."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from pool.connection import Connection
from servicekit.errors import Fatal
from tests.trainer.model import small
from tests.trainer.saved import save, whole_tensors
from trainer.algorithm.settings import LossSettings
from trainer.checkpoints import writer
from trainer.checkpoints.folder import Checkpoints
from trainer.checkpoints.saved_state import write_shards
from trainer.checkpoints.writer import CheckpointWriter
from trainer.learner import Learner
from trainer.learner_state import state_tensors
from trainer.model.settings import LearnerSettings
from trainer.model.sharding import Ranks
from trainer.rank_orders import RankOrders
from trainer.saving import Saving
from trainer.training import DecisionTraining

TENSORS = {"weight.a": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(7)}


class Died(Exception):
    pass


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "run", keep=2)
    place = save(checkpoints, 12, TENSORS, {"run": "run"})
    assert place == tmp_path / "run" / "00000012"
    assert checkpoints.newest() == 12
    assert checkpoints.description(12) == {"run": "run"}
    loaded = whole_tensors(place)
    assert all(loaded[name].equal(tensor.float()) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("stage", ["checkpoint written", "checkpoint renamed"])
def test_a_process_that_dies_while_saving_leaves_a_whole_checkpoint_or_none(
    tmp_path: Path, stage: str
) -> None:
    def die(at: str) -> None:
        if at == stage:
            raise Died

    save(Checkpoints(tmp_path, "run", keep=2), 1, TENSORS)
    with pytest.raises(Died):
        save(Checkpoints(tmp_path, "run", keep=2, probe=die), 2, TENSORS)
    after = Checkpoints(tmp_path, "run", keep=2)
    assert after.newest() == (1 if stage == "checkpoint written" else 2)
    save(after, 3, TENSORS)
    assert after.versions()[-1] == 3
    assert not list((tmp_path / "run").glob(".*")), "what was not finished is cleared away"


def test_the_newest_are_kept_and_every_nth(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "run", keep=2, keep_every=4)
    for version in range(1, 10):
        save(checkpoints, version, TENSORS)
    assert checkpoints.versions() == [4, 8, 9]


def test_a_broken_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "run", keep=2)
    place = save(checkpoints, 1, TENSORS)
    next(place.glob("*.safetensors")).write_bytes(b"\x00" * 4)
    with pytest.raises(Fatal, match="move it away"):
        whole_tensors(place)


def test_other_files_beside_checkpoints_do_no_harm(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "run", keep=2)
    save(checkpoints, 1, TENSORS)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert checkpoints.versions() == [1]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Files are written once it is set."""
    opened = threading.Event()

    def write_later(*arguments: Any) -> None:
        opened.wait()
        write_shards(*arguments)

    monkeypatch.setattr(writer, "write_shards", write_later)
    yield opened
    opened.set()  # a thread that waits for ever would hold up the end of the process


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, gate: threading.Event
) -> None:
    learner, checkpoints = small_learner(), Checkpoints(tmp_path, "run", keep=2)
    learner.step(small.batch(seed=1))
    at_save = {name: tensor.clone() for name, tensor in state_tensors(learner).items()}
    writing = CheckpointWriter(checkpoints, Ranks(), incarnation=1)
    writing.start(1, state_tensors(learner), {})
    learner.step(small.batch(seed=2))
    assert writing.poll() is None and checkpoints.versions() == []
    gate.set()
    writing.wait()
    assert writing.poll() == 1 and checkpoints.versions() == [1]
    saved = whole_tensors(checkpoints.path(1))
    assert set(saved) == set(at_save)
    assert all(saved[name].equal(tensor.float()) for name, tensor in at_save.items())


def test_one_checkpoint_is_written_after_the_other(tmp_path: Path, gate: threading.Event) -> None:
    """Both use the same memory, so the second begins when the first is on disk."""
    checkpoints = Checkpoints(tmp_path, "run", keep=2)
    writing = CheckpointWriter(checkpoints, Ranks(), incarnation=1)
    values = torch.zeros(3)
    writing.start(1, {"weight.a": values}, {})
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(writing.start, 2, {"weight.a": values.add(1)}, {})
        assert not second.done()
        gate.set()
        second.result()
    writing.wait()
    assert [float(whole_tensors(checkpoints.path(v))["weight.a"][0]) for v in (1, 2)] == [0, 1]


def test_a_checkpoint_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a folder")
    writing = CheckpointWriter(Checkpoints(tmp_path, "run", keep=2), Ranks(), incarnation=1)
    writing.start(1, TENSORS, {})
    with pytest.raises(Fatal, match=r"checkpoint .*/run/00000001 cannot be written: "):
        writing.wait()


def test_a_stopped_trainer_waits_for_the_write_and_leaves_a_model(
    tmp_path: Path, tiny_model: Path, gate: threading.Event
) -> None:
    """The version counts as saved when it is on disk, not before."""
    checkpoints = Checkpoints(tmp_path, "run", keep=2)
    training = made_training(tiny_model, checkpoints)
    decider = NotedCheckpoints()
    saving = Saving(5, training, cast(Any, decider), RankOrders(Ranks()), cast(Any, NoProgress()))
    training.version = 5
    saving.save_if_due()
    saving.note_complete()
    assert decider.noted == []
    training.version = 6
    with ThreadPoolExecutor(1) as thread:
        finished = thread.submit(saving.finish)
        assert not finished.done() and checkpoints.versions() == []
        gate.set()
        finished.result()
    assert checkpoints.versions() == [5, 6] and decider.noted[-1] == 6
    assert checkpoints.exported_version() == 6
    exported = AutoModelForCausalLM.from_pretrained(checkpoints.model)
    assert exported.dtype == torch.bfloat16
    assert not training.is_model_due()


def small_learner() -> Learner:
    settings = LearnerSettings(learning_rate=1e-3)
    return Learner(small.model(), settings, LossSettings(), device=torch.device("cpu"))


def made_training(model: Path, checkpoints: Checkpoints) -> DecisionTraining:
    learner = Learner.from_folder(model, LearnerSettings(), LossSettings())
    description = {"run": "run", "model": str(model)}
    return DecisionTraining(Connection(), learner, checkpoints, description)


class NotedCheckpoints:
    """A decider that is told of checkpoints."""

    def __init__(self) -> None:
        self.noted: list[int] = []

    def checkpoint_is_due(self) -> bool:
        return False

    def note_checkpoint(self, version: int) -> None:
        self.noted.append(version)


class NoProgress:
    @contextmanager
    def phase(self, _: str) -> Iterator[None]:
        yield
