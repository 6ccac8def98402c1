"""Which rows fit which GPU: `python -m bench.training.memory` prints the table in docs/training.md.

With `--measure`, on a GPU: the peak memory and the time of a step of a model of the shape of
Qwen2.5-0.5B, with and without recomputation and offload, beside what is computed.
"""

import argparse
import gc
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.training.rows import batch_of
from bench.training.speed import config, model
from trainer.algorithm.settings import LossSettings
from trainer.learner import Learner
from trainer.model.memory import GIB, ModelShape, estimate_memory
from trainer.model.settings import ExecutionSettings, LearnerSettings

SHAPES = {
    "0.5B": ModelShape(24, 896, 4864, 14, 2, 151936, head_size=64, is_tied=True),
    "1.5B": ModelShape(28, 1536, 8960, 12, 2, 151936, is_tied=True),
    "3B": ModelShape(36, 2048, 11008, 16, 2, 151936, is_tied=True),
    "7B": ModelShape(28, 3584, 18944, 28, 4, 152064),
    "14B": ModelShape(48, 5120, 13824, 40, 8, 152064),
    "32B": ModelShape(64, 5120, 27648, 40, 8, 152064),
    "72B": ModelShape(80, 8192, 29568, 64, 8, 152064),
}
"""Of Qwen2.5."""
ROWS = (
    (1, 80, ("0.5B", "1.5B", "3B", "7B")),
    (1, 141, ("3B", "7B", "14B")),
    (8, 80, ("7B", "14B", "32B")),
    (8, 141, ("14B", "32B", "72B")),
)
"""GPUs, their memory in GB, and models to try."""
LORA_RANK = 32
GB = 10**9


class Column(NamedTuple):
    name: str
    execution: ExecutionSettings
    lora_rank: int = 0


RECOMPUTED = ExecutionSettings(gradient_checkpointing=True)
OFFLOADED = RECOMPUTED.model_copy(update={"offload_activations": True})
ALL_OFFLOADED = OFFLOADED.model_copy(update={"offload_optimiser": True})
COLUMNS = (
    Column("all kept", ExecutionSettings()),
    Column("recomputed", RECOMPUTED),
    Column("and activations offloaded", OFFLOADED),
    Column("and optimizer offloaded", ALL_OFFLOADED),
    Column(f"LoRA {LORA_RANK}, recomputed", RECOMPUTED, LORA_RANK),
)


def table() -> str:
    """The longest rows that fit, in Markdown."""
    head = ["GPUs", "model", *(column.name for column in COLUMNS)]
    lines = [head]
    for gpus, size, names in ROWS:
        lines += [
            [f"{gpus} × {size} GB", name, *_cells(SHAPES[name], gpus, size)] for name in names
        ]
    first, *others = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([first, "|---" * len(head) + "|", *others])


def _cells(shape: ModelShape, gpus: int, size: int) -> list[str]:
    estimates = [
        estimate_memory(shape, column.execution, ranks=gpus, lora_rank=column.lora_rank)
        for column in COLUMNS
    ]
    return [_format(estimate.longest_pack(size * GB)) for estimate in estimates]


def _format(tokens: int) -> str:
    return f"{tokens // 1000}k" if tokens >= 1000 else "–"


def measure(tiny: bool, limit: float) -> None:
    """Steps of two packs, each one row, so that gradients are there in the second pass."""
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length = 64 if tiny else 32768
    batch = batch_of(np.array([length, length]), config(tiny).vocab_size)
    estimated = ModelShape.of(config(tiny))
    print(f"{torch.__version__}, {device}, rows of {length:,} tokens\n")
    optimiser_only = ExecutionSettings(offload_optimiser=True)
    for name, execution in [
        *((column.name, column.execution) for column in COLUMNS if not column.lora_rank),
        ("optimizer offloaded", optimiser_only),
    ]:
        if time.perf_counter() - began > limit:
            print(f"no time left for: {name}")
            continue
        execution = execution.model_copy(update={"tokens_per_pack": length})
        computed = estimate_memory(estimated, execution).total(length) / GIB
        peak, seconds = _run(tiny, device, execution, batch)
        print(
            f"{name:28}{computed:7.1f} GiB computed {peak:7.1f} GiB measured {seconds:7.2f} s a step",
            flush=True,
        )


def _run(tiny: bool, device: Any, execution: ExecutionSettings, batch: Any) -> tuple[float, float]:
    """Peak memory in GiB, and seconds of a step after the first."""
    learner = Learner(
        model(tiny, device), LearnerSettings(), LossSettings(), execution, device=device
    )
    learner.step(batch)
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    learner.step(batch)
    if is_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() / GIB if is_gpu else 0.0
    del learner
    gc.collect()
    if is_gpu:
        torch.cuda.empty_cache()
    return peak, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="run steps on this machine's GPU")
    parser.add_argument("--tiny", action="store_true", help="with a tiny model, on any machine")
    parser.add_argument("--limit", type=float, default=90, help="start no step after this many s")
    options = parser.parse_args()
    if options.measure:
        measure(options.tiny, options.limit)
    else:
        print(table())


if __name__ == "__main__":
    main()
