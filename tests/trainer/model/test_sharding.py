"""Processes that share a model with FSDP2 over gloo, against one."""

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
from tests.trainer.saved import save, whole_tensors
from trainer.checkpoints.folder import Checkpoints
from trainer.checkpoints.saved_state import SavedState
from trainer.learner import Learner
from trainer.learner_state import restore_state

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
KINDS = ("Qwen2", "Mamba")
OF_THE_PLAN = {"packs", "balance", "tree_tokens"}
"""Metrics that depend on the number of ranks."""
MODELS = {
    "tied": ("Qwen2", {}),
    "untied": ("Llama", {}),
    "experts": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}


def run_ranks(count: int, *arguments: str) -> None:
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.model.rank", *arguments],
            cwd=ROOT,
            env=os.environ | common | {"RANK": str(place)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in range(count)
    ]
    told = [process.communicate(timeout=240)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * count, "\n".join(told)[-5000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left behind."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(2, "train", str(folder), *KINDS)
    return folder


@pytest.fixture(scope="module")
def resharded(trained: Path) -> Path:
    """What three ranks made of the checkpoint of two, and of some folders."""
    for name, (kind, fields) in MODELS.items():
        small.model(kind, **fields).save_pretrained(trained / "models" / name)
    run_ranks(3, "restore", str(trained), "Qwen2")
    return trained


@cache
def alone(kind: str) -> tuple[Learner, list[dict[str, float]]]:
    return rank.train(kind)


def saved(folder: Path, run: str) -> Path:
    return folder / run / f"{1:08}"


def noted(folder: Path, name: str, rank: int) -> Any:
    return json.loads((folder / f"{name}-{rank}.json").read_text())


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert set(ours) == set(theirs)
    assert not [name for name in ours if not ours[name].equal(theirs[name])]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_make_the_weights_that_one_makes(trained: Path, kind: str) -> None:
    learner, _ = alone(kind)
    state = whole_tensors(saved(trained, kind))
    for name, weight in learner.trained.parameters.items():
        torch.testing.assert_close(state[f"weight.{name}"], weight.detach(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_all_ranks(trained: Path, kind: str) -> None:
    _, expected = alone(kind)
    for one, other in zip(noted(trained, kind, 0), expected, strict=True):
        for name in set(other) - OF_THE_PLAN - {"tokens_per_second"}:
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("place", [0, 1])
def test_a_rank_saves_its_shards_and_holds_no_whole_model(trained: Path, place: int) -> None:
    size = noted(trained, "Qwen2-bytes", place)
    assert size["own"] < 0.6 * size["whole"]
    files = list(saved(trained, "Qwen2").glob("*.safetensors"))
    assert len(files) == 2
    assert max(file.stat().st_size for file in files) < 0.75 * size["whole"]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_go_on_from_a_checkpoint(trained: Path, kind: str) -> None:
    kept, restored = (
        whole_tensors(saved(trained, f"{kind}-{name}")) for name in ("kept", "restored")
    )
    assert set(kept) == set(restored)
    for name, tensor in kept.items():
        torch.testing.assert_close(restored[name], tensor, rtol=1e-4, atol=2e-5)


def test_three_ranks_restore_what_two_have_saved(resharded: Path) -> None:
    assert len(list(saved(resharded, "Qwen2-resharded").glob("*.safetensors"))) == 3
    assert_same(
        whole_tensors(saved(resharded, "Qwen2-resharded")), whole_tensors(saved(resharded, "Qwen2"))
    )


def test_one_process_goes_on_from_the_checkpoint_of_two(trained: Path, tmp_path: Path) -> None:
    learner = rank.learner_of("Qwen2")
    restore_state(learner, SavedState(saved(trained, "Qwen2")))
    assert learner.steps == rank.STEPS
    again = save(Checkpoints(tmp_path, "again", keep=1), 1, learner)
    assert_same(whole_tensors(again), whole_tensors(saved(trained, "Qwen2")))
    learner.step(rank.batch_of("Qwen2", 9))
    expected = whole_tensors(saved(trained, "Qwen2-kept"))
    for name, weight in learner.trained.parameters.items():
        after = expected[f"weight.{name}"]
        torch.testing.assert_close(weight.detach(), after, rtol=1e-4, atol=2e-5)


def test_whole_weights_are_gathered_for_engines_and_folders(trained: Path) -> None:
    sent, in_bf16 = torch.load(trained / "Qwen2-sent.pt")
    state = whole_tensors(saved(trained, "Qwen2"))
    plain = dict(small.model().named_parameters())
    assert list(sent) == list(plain)
    exported = AutoModelForCausalLM.from_pretrained(trained / "Qwen2-model").state_dict()
    for name, weight in sent.items():
        assert torch.equal(weight, state[f"weight.causal.{name}"])
        assert torch.equal(weight, exported[name])
        assert torch.equal(weight.bfloat16(), in_bf16[name])


def test_adapters_are_the_same_on_any_number_of_ranks(resharded: Path) -> None:
    pytest.importorskip("peft", reason="LoRA needs peft")
    learner = rank.train_adapters(resharded)
    found = whole_tensors(saved(resharded, "adapters"), "weight.")
    assert len(found) == len(learner.trained.parameters)
    for name, weight in learner.trained.parameters.items():
        torch.testing.assert_close(found[f"weight.{name}"], weight.detach(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_load_a_folder_shard_by_shard(resharded: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(resharded / "models" / name, dtype=torch.float32)
    expected = {f"weight.causal.{key}": weight for key, weight in model.named_parameters()}
    assert_same(whole_tensors(saved(resharded, name), "weight."), expected)
    counts = [noted(resharded, f"{name}-elements", place) for place in range(3)]
    assert sum(count["own"] for count in counts) == counts[0]["whole"], "each element by one rank"
