"""Passes that do not fit into memory: the step goes on with smaller packs, or says what to set."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from servicekit.errors import Fatal
from tests.conftest import free_port
from tests.trainer.model import small
from tests.trainer.test_learner import close, learner, weights_of
from trainer.algorithm.settings import LossSettings
from trainer.learner import Learner
from trainer.model.settings import ExecutionSettings
from trainer.model.sharding import Ranks
from trainer.out_of_memory import NextStartNeeded
from trainer.pack_limit import PackLimit

ROOT = Path(__file__).parents[2]
BATCH = small.batch()
LONGEST = max(len(row) for sample in BATCH.samples for row in sample.rows)
TWO_STEPS = LossSettings(loss="ppo_clip", optimiser_steps=2)


def limit_memory(made: Learner, tokens: int, after: int = 0) -> None:
    """A device with room for that many tokens, from the pass with number `after` on."""
    forward, passes = made.model.forward, 0

    def run(pack: Any, *mode: Any) -> Any:
        nonlocal passes
        passes += 1
        if len(pack.ids) > tokens and passes > after:
            raise torch.OutOfMemoryError
        return forward(pack, *mode)

    made.model.forward = run  # type: ignore[assignment, method-assign]


def trained(made: Learner) -> torch.Tensor:
    made.step(BATCH)
    return weights_of(made)


def test_packs_are_halved_until_they_fit_and_stay_so(caplog: pytest.LogCaptureFixture) -> None:
    made = learner(tokens_per_pack=160)
    limit_memory(made, tokens=LONGEST)
    with caplog.at_level(logging.WARNING):
        metrics = made.step(BATCH)
    assert metrics["out_of_memory"] > 0
    assert metrics["tokens_per_pack"] == made.execution.tokens_per_pack <= LONGEST
    assert "repeating the optimizer step, with tokens_per_pack" in caplog.text
    size = made.execution.tokens_per_pack
    assert made.steps == 1
    assert torch.equal(weights_of(made), trained(learner(tokens_per_pack=size)))
    assert made.step(BATCH)["out_of_memory"] == 0


def test_a_pack_below_the_limit_is_halved_itself() -> None:
    made = learner(tokens_per_pack=10**9)
    limit_memory(made, tokens=100)
    assert made.step(BATCH)["out_of_memory"] < 5


def test_of_several_optimiser_steps_only_the_present_one_is_repeated() -> None:
    whole = learner(loss=TWO_STEPS, tokens_per_pack=10**6)
    made = learner(loss=TWO_STEPS, tokens_per_pack=10**6)
    limit_memory(made, tokens=LONGEST, after=1)
    metrics = made.step(BATCH)
    assert metrics["out_of_memory"] > 0
    assert metrics["trajectories"] == len(BATCH.samples)
    assert made.steps == 2
    assert close(weights_of(made), trained(whole))


def test_a_failed_backward_pass_leaves_no_gradient() -> None:
    """In bf16 gradients lie on copies of the weights for a moment."""
    made, other = (learner(dtype="bfloat16", tokens_per_pack=64) for _ in range(2))
    failures = iter([True])

    def fail(gradient: Any) -> None:
        if next(failures, False):
            raise torch.OutOfMemoryError

    next(iter(made.model.parameters())).register_hook(fail)
    assert made.step(BATCH)["out_of_memory"] == 1
    other.execution = made.execution
    assert torch.equal(weights_of(made), trained(other))


def test_a_row_that_does_not_fit_alone_ends_in_what_to_do() -> None:
    made = learner()
    before = weights_of(made).clone()
    limit_memory(made, tokens=LONGEST - 1)
    with pytest.raises(Fatal, match=f"a row of {LONGEST} tokens .*--give-up {BATCH.version}"):
        made.step(BATCH)
    assert torch.equal(weights_of(made), before)


def test_without_its_proximal_log_probs_a_batch_goes_on_after_a_new_start(tmp_path: Path) -> None:
    loss = LossSettings(loss="decoupled", ratio="decoupled", optimiser_steps=2)
    made = learner(loss=loss, tokens_per_pack=10**6)
    limit = PackLimit(tmp_path / "run", made.execution)
    limit_memory(made, tokens=LONGEST, after=3)  # two passes for the proximal policy, then a step
    with pytest.raises(NextStartNeeded, match="start again"), limit.keep_for_next_start():
        made.step(BATCH)
    smaller = limit.apply(Ranks())
    assert smaller.tokens_per_pack < 10**3
    assert learner(loss=loss, tokens_per_pack=smaller.tokens_per_pack).step(BATCH)


def test_another_setting_takes_the_limit_of_an_earlier_start_back(tmp_path: Path) -> None:
    settings = ExecutionSettings(tokens_per_pack=1000)
    limit = PackLimit(tmp_path, settings)
    assert limit.apply(Ranks()) == settings
    with pytest.raises(NextStartNeeded), limit.keep_for_next_start():
        raise NextStartNeeded(900, 450)
    assert json.loads(limit.path.read_text()) == {"setting": 1000, "tokens_per_pack": 450}
    assert limit.apply(Ranks()).tokens_per_pack == 450
    raised = ExecutionSettings(tokens_per_pack=2000)
    assert PackLimit(tmp_path, raised).apply(Ranks()) == raised


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_several_ranks_all_end_and_the_next_start_continues(tmp_path: Path) -> None:
    """Ranks are processes that torchrun starts: it ends the one that waits for the failed one."""
    rank = ["-m", "tests.trainer.out_of_memory_rank", str(tmp_path)]

    def start() -> int:
        port = ["--master-port", str(free_port())]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *port]
        threads = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run([*command, *rank], cwd=ROOT, env=threads, timeout=120).returncode

    assert start() == 1
    limit = json.loads((tmp_path / "pack-limit.json").read_text())
    assert limit["tokens_per_pack"] <= LONGEST < limit["setting"]
    assert start() == 0
