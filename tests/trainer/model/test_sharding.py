"""Two processes that share a model with FSDP2 over gloo, against one."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import free_port
from tests.trainer.model import rank, small
from trainer.learner import Learner

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
KINDS = ("Qwen2", "Mamba")
OF_THE_PLAN = {"packs", "balance", "tree_tokens"}
"""Metrics that depend on the number of ranks."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left behind."""
    folder = tmp_path_factory.mktemp("ranks")
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.trainer.model.rank", str(folder), *KINDS]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | common | {"RANK": str(place), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in range(2)
    ]
    told = [process.communicate(timeout=240)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(told)[-5000:]
    return folder


@cache
def alone(kind: str) -> tuple[Learner, list[dict[str, float]]]:
    return rank.train(kind)


def left(folder: Path, kind: str) -> Any:
    return torch.load(folder / f"{kind}.pt")


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_make_the_weights_that_one_makes(trained: Path, kind: str) -> None:
    learner, _ = alone(kind)
    state = left(trained, kind)["state"]
    for name, weight in learner.trained.parameters.items():
        torch.testing.assert_close(state[f"weight.{name}"], weight.detach(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_all_ranks(trained: Path, kind: str) -> None:
    _, expected = alone(kind)
    found = json.loads((trained / f"{kind}.json").read_text())
    for one, other in zip(found, expected, strict=True):
        for name in set(other) - OF_THE_PLAN - {"tokens_per_second"}:
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_go_on_from_a_saved_state(trained: Path, kind: str) -> None:
    kept, restored = torch.load(trained / f"{kind}-after.pt")
    assert set(kept) == set(restored)
    for name, tensor in kept.items():
        torch.testing.assert_close(restored[name], tensor, rtol=1e-4, atol=2e-5)


def test_whole_weights_are_gathered_for_engines_and_folders(trained: Path) -> None:
    found = left(trained, "Qwen2")
    plain = dict(small.model().named_parameters())
    assert list(found["sent"]) == list(plain)
    exported = AutoModelForCausalLM.from_pretrained(trained / "Qwen2-model").state_dict()
    for name, weight in found["sent"].items():
        assert torch.equal(weight, found["state"][f"weight.causal.{name}"])
        assert torch.equal(weight, exported[name])


def test_one_process_goes_on_from_the_state_of_two(trained: Path) -> None:
    found = left(trained, "Qwen2")["state"]
    learner = rank.learner_of("Qwen2")
    learner.load_state(found)
    assert learner.steps == rank.STEPS
    state = learner.state()
    assert set(state) == set(found)
    assert all(torch.equal(state[name], tensor) for name, tensor in found.items())
    learner.step(rank.batch_of("Qwen2", 9))
    expected = torch.load(trained / "Qwen2-after.pt")[0]
    for name, weight in learner.trained.parameters.items():
        after = expected[f"weight.{name}"]
        torch.testing.assert_close(weight.detach(), after, rtol=1e-4, atol=2e-5)
