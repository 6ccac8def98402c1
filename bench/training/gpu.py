"""Tokens per second and memory of a training step on one GPU: `python -m bench.training.gpu`.

A model of the shape of Qwen2.5-0.5B with random weights, and the whole step: packs, log-probs, loss,
backward pass, clipping, AdamW. First trees against rows; then rows of log-normal length with several
settings, and for comparison the usual loop with padded rows. Only tokens of rows are counted, not
padding. Needs torch, transformers, numpy and pydantic. `--tiny` runs everything with a tiny model, on
any machine.
"""

import argparse
import gc
import logging
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.training import trees
from bench.training.rows import batch_of, lengths
from bench.training.speed import SpeedTable, config, model
from bench.training.variants import ours, usual, variants
from trainer.algorithm.settings import LossSettings
from trainer.learner import Learner
from trainer.model.settings import ExecutionSettings, LearnerSettings


def compare_trees(tiny: bool, device: Any, table: SpeedTable) -> None:
    learner = Learner(
        model(tiny, device), LearnerSettings(), LossSettings(), ExecutionSettings(), device=device
    )
    print(f"found by trying: {learner.model.mode}", flush=True)
    trees.compare_results(learner)
    trees.compare_speed(learner, table, 32 if tiny else 1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on any machine")
    parser.add_argument("--quick", action="store_true", help="only the main variants")
    parser.add_argument("--profile", action="store_true", help="print a profile of a step")
    parser.add_argument("--trees", action="store_true", help="only trees against rows")
    parser.add_argument(
        "--limit", type=float, default=270, help="seconds after which no new variant is started"
    )
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    # Shows which execution modes were tried, and why one does not work.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
    )
    shape = config(options.tiny)
    table = SpeedTable(shape, device)

    def attempt(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # a variant that fails must not end the run
            traceback.print_exc()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    print(f"{torch.__version__}, {device}\n")
    attempt(lambda: compare_trees(options.tiny, device, table))
    if not options.trees:
        mean, most = (60, 300) if options.tiny else (600, 3072)
        batch = batch_of(lengths(32 if options.tiny else 512, mean, most), shape.vocab_size)
        fewer = batch_of(lengths(32 if options.tiny else 128, mean, most), shape.vocab_size)
        attempt(lambda: usual(options.tiny, device, table, fewer))
        for name, settings, how in variants(options.quick):
            if time.perf_counter() - began > options.limit:
                print(f"no time left for: {name}")
                continue
            how = how | {"name": name, "is_profiled": options.profile}
            attempt(partial(ours, options.tiny, device, table, batch, settings, how))
        times = table.best / max(table.usual, 1)
        print(f"\nbest {table.best:,.0f} tokens/s, {times:.1f} times the usual loop")
    print(f"total: {time.perf_counter() - began:.0f} s")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
