"""A training step on the CPU beside TRL's, with the same model and rows.

TRL runs GRPOTrainer's loss on rows padded by its own rules (prompts left, completions right), the
backward pass, clipping and AdamW, in micro-batches of 8 rows. steplog runs Learner.step. Only tokens of
rows are counted, not padding.
"""

import contextlib
import io
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from bench.training import trees
from bench.training.rows import batch_of, lengths
from bench.training.speed import SpeedTable
from tests.tiny_model import build_tokenizer
from trainer.algorithm.settings import LossSettings
from trainer.learner import Learner
from trainer.model.settings import LearnerSettings

Tensor = Any
ROWS, MEAN, MOST = 32, 150, 768
ROWS_AT_ONCE = 8
"""The default of transformers' Trainer, and so of TRL."""
ROUNDS = 3
RATE = 1e-6
TREE_SCALE = 8


def model() -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=4096,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
    )


def run() -> None:
    batch = batch_of(lengths(ROWS, MEAN, MOST), 4096)
    tokens = sum(len(row) for sample in batch.samples for row in sample.rows)
    # With several threads, a busy machine would disturb one side more than the other.
    torch.set_num_threads(1)
    print(f"\ntraining step on one core, {tokens:,} tokens in {ROWS} rows")
    steps = {"TRL": trl_step(batch), "steplog": our_step(batch)}
    # In turns, so that other load on the machine affects both.
    durations: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS + 1):
        for name, step in steps.items():
            durations[name].append(seconds(step))
    speeds = {name: tokens / min(each[1:]) for name, each in durations.items()}
    for name, speed in speeds.items():
        print(f"{name:12}{speed:12,.0f} tokens/s")
    print(f"{'ratio':12}{speeds['steplog'] / speeds['TRL']:12.1f}")


def run_trees() -> None:
    """Trees against rows: the same results, and fewer tokens to compute."""
    print("\nprefix trees on one core")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    learner = Learner(model(), LearnerSettings(learning_rate=RATE), LossSettings(), device=device)
    trees.compare_results(learner)
    trees.compare_speed(learner, SpeedTable(learner.model.causal.config, device), TREE_SCALE)


def seconds(step: Callable[[], Any]) -> float:
    """CPU seconds of a step, since the machine may be shared."""
    began = time.process_time()
    step()
    return time.process_time() - began


def our_step(batch: Any) -> Callable[[], Any]:
    loss = LossSettings(loss="ppo_clip")
    learner = Learner(
        model(), LearnerSettings(learning_rate=RATE), loss, device=torch.device("cpu")
    )
    return lambda: learner.step(batch)


def trl_step(batch: Any) -> Callable[[], Any]:
    trainer = _trl()
    policy = trainer.model.train()
    optimiser = torch.optim.AdamW(policy.parameters(), lr=RATE)
    trained = sum(int(row.trainable.sum()) for sample in batch.samples for row in sample.rows)
    inputs = [
        _as_collated(batch, slice(start, start + ROWS_AT_ONCE), trained)
        for start in range(0, ROWS, ROWS_AT_ONCE)
    ]

    def step() -> None:
        for each in inputs:
            trainer.compute_loss(policy, each).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def _trl() -> Any:
    """Its trainer, as its users make it; only that it never generates."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        folder = Path(tempfile.mkdtemp())
        arguments = GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=ROWS_AT_ONCE,
            gradient_accumulation_steps=ROWS // ROWS_AT_ONCE,
            num_generations=ROWS_AT_ONCE,
            gradient_checkpointing=False,
            beta=0.0,
        )
        trainer = GRPOTrainer(
            model=model(),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "-"}]),
            processing_class=AutoTokenizer.from_pretrained(build_tokenizer(folder)),
        )
        trainer.current_gradient_accumulation_steps = arguments.gradient_accumulation_steps
    return trainer


def _as_collated(batch: Any, some: slice, trained: int) -> dict[str, Tensor]:
    rows = [sample.rows[0] for sample in batch.samples[some]]
    firsts = [int(row.trainable.argmax()) for row in rows]
    prompts = [
        torch.from_numpy(row.ids[:first]).long() for row, first in zip(rows, firsts, strict=True)
    ]
    answers = [
        torch.from_numpy(row.ids[first:]).long() for row, first in zip(rows, firsts, strict=True)
    ]
    behaviour = [torch.from_numpy(row.behaviour[f:]) for row, f in zip(rows, firsts, strict=True)]
    return {
        "prompt_ids": _padded(prompts, "left"),
        "prompt_mask": _padded([torch.ones_like(ids) for ids in prompts], "left"),
        "completion_ids": _padded(answers, "right"),
        "completion_mask": _padded([torch.ones_like(ids) for ids in answers], "right"),
        "old_per_token_logps": _padded(behaviour, "right"),
        "advantages": torch.tensor(batch.advantages[some], dtype=torch.float32),
        "num_items_in_batch": torch.tensor(float(trained)),
    }


def _padded(tensors: Sequence[Tensor], side: str) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side)


if __name__ == "__main__":
    run()
