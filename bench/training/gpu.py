"""Tokens per second of a training step on one GPU: `python -m bench.training.gpu`.

A model of the shape of Qwen2.5-0.5B with random weights, rows of log-normal length, and the whole
step: packs, log-probs, loss, backward pass, clipping, AdamW; and for comparison the usual loop with
padded rows. Only tokens of rows are counted, not padding. Needs torch, transformers, numpy and
pydantic. `--tiny` runs everything with a tiny model, on any machine.
"""

import argparse
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench.training import padded_loop
from bench.training.rows import batch_of, lengths
from trainer.algorithm.settings import LossSettings
from trainer.learner import Learner
from trainer.model import attention, logprobs
from trainer.model.settings import ExecutionSettings, LearnerSettings

PEAK = 790e12
"""Floating point operations per second of bf16 that a matrix product reaches on an H200."""
MEASURED_STEPS = 3
GIB = 2**30


def config(tiny: bool) -> Any:
    shape = (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 263}
        if tiny
        else {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "vocab_size": 151936,
        }
    )
    heads = (4, 2) if tiny else (14, 2)
    return Qwen2Config(
        **shape,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )


def model(tiny: bool, device: Any, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        made = Qwen2ForCausalLM(config(tiny))
    return made.to(dtype)


def operations(shape: Any, batch: Any) -> float:
    """Floating point operations of a step without recomputation: 6 per weight and token, plus
    attention."""
    rows = [row for sample in batch.samples for row in sample.rows]
    sizes = np.array([len(row) for row in rows], np.float64)
    trained = sum(int(row.trainable.sum()) for row in rows)
    wide, size = shape.hidden_size, shape.hidden_size // shape.num_attention_heads
    linear = (
        2 * wide * (wide + size * shape.num_key_value_heads) + 3 * wide * shape.intermediate_size
    )
    layers = shape.num_hidden_layers
    attended = 6 * layers * wide * float((sizes**2).sum())
    head = 6 * wide * shape.vocab_size * trained
    return float(6 * layers * linear * sizes.sum() + head + attended)


class SpeedTable:
    def __init__(self, shape: Any, device: Any) -> None:
        self._shape, self._device = shape, device
        self.best = 0.0
        self.usual = 0.0

    def measure(self, name: str, batch: Any, step: Callable[[], Any]) -> float:
        tokens = sum(len(row) for sample in batch.samples for row in sample.rows)
        self._forget_peak()
        began = self._now()
        step()
        first = self._now() - began
        began = self._now()
        for _ in range(MEASURED_STEPS):
            step()
        seconds = (self._now() - began) / MEASURED_STEPS
        speed = tokens / seconds
        mfu = operations(self._shape, batch) / seconds / PEAK
        print(
            f"{name:46}{speed:12,.0f} tokens/s {mfu:6.1%} MFU {self._peak():7.1f} GiB "
            f"{seconds:7.2f} s a step, the first {first:6.1f} s",
            flush=True,
        )
        return speed

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _forget_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> float:
        return torch.cuda.max_memory_allocated() / GIB if self._device.type == "cuda" else 0.0


def usual(tiny: bool, device: Any, table: SpeedTable, batch: Any) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    peer = model(tiny, device, dtype).train()
    optimiser = torch.optim.AdamW(peer.parameters(), lr=1e-6, fused=device.type == "cuda")
    for rows_at_once in (4, 8):
        name = f"usual loop, {rows_at_once} padded rows at once"
        step = partial(padded_loop.step, peer, optimiser, batch, rows_at_once, device)
        speed = table.measure(name, batch, step)
        table.usual = max(table.usual, speed)


def variants(quick: bool) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, execution settings, and other options of each variant."""
    packed = {"tokens_per_pack": 32768, "compile": False}
    fast = packed | {"compile": True}
    yield "packs of 32k", packed, {}
    yield "packs of 32k, compiled", fast, {"profile": True}
    if quick:
        return
    yield "packs of 16k, compiled", fast | {"tokens_per_pack": 16384}, {}
    yield "packs of 64k, compiled", fast | {"tokens_per_pack": 65536}, {}
    yield "packs of 32k, compiled, logits of 8 GiB", fast, {"chunk": 8 * GIB}
    yield "packs of 32k, compiled, logits kept", fast, {"chunk": 40 * GIB}
    yield "packs of 32k, FSDP2 of one rank, compiled", fast, {"shard": True}
    yield "packs of 32k, FSDP2 of one rank", packed, {"shard": True}
    yield "packs of 32k, flex attention, compiled", fast, {"kernel": "flex"}
    yield "packs of 32k, float32 head, compiled", fast, {"fp32_head": True}
    yield "packs of 32k, recomputed layers, compiled", fast | {"gradient_checkpointing": True}, {}


def ours(
    tiny: bool, device: Any, table: SpeedTable, batch: Any, settings: dict[str, Any], how: Any
) -> None:
    if tiny:
        settings = settings | {"tokens_per_pack": settings["tokens_per_pack"] // 16}
    torch._dynamo.reset()
    kept = dict(logprobs.CHUNK_BYTES)
    logprobs.CHUNK_BYTES["cuda"] = how.get("chunk", kept["cuda"])
    offered = attention.kernels
    if "kernel" in how and device.type == "cuda":
        attention.kernels = lambda *_: (how["kernel"],)
    try:
        learner = Learner(
            model(tiny, device),
            LearnerSettings(fp32_head=how.get("fp32_head", False)),
            LossSettings(),
            ExecutionSettings(**settings),
            device=device,
            shard=how.get("shard", False),
        )
        name = f"{how['name']} ({learner.model.mode.kernel}, {learner.model.mode.head})"
        table.best = max(table.best, table.measure(name, batch, lambda: learner.step(batch)))
        if how.get("profile") and how.get("is_profiled"):
            _profile(learner, batch)
    finally:
        logprobs.CHUNK_BYTES.update(kept)
        attention.kernels = offered


def _profile(learner: Learner, batch: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds) as seen:
        learner.step(batch)
        if learner.device.type == "cuda":
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if learner.device.type == "cuda" else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60))


def same_gradient(tiny: bool, device: Any) -> None:
    """Prints how close the gradients are: of packed rows, and row by row with the model's attention."""
    learner = Learner(model(tiny, device), LearnerSettings(), LossSettings(), device=device)
    batch = batch_of(lengths(8, 100, 300, seed=5), learner.model.causal.config.vocab_size)
    (minibatch,) = learner.minibatches(batch)
    found = []
    best = learner.model.mode
    for way in (best, type(best)("single", "full")):
        learner.model.mode = way
        for part in minibatch.packs:
            tokens = learner._tokens(part, len(batch.samples))
            (tokens.current * tokens.advantages).mean().backward()
        weights = learner.trained.parameters.values()
        found.append(torch.cat([weight.grad.flatten() for weight in weights]))
        learner.optimiser.zero_grad(set_to_none=True)
    cosine = torch.nn.functional.cosine_similarity(found[0], found[1], dim=0)
    norms = [float(gradient.norm()) for gradient in found]
    print(f"{best} and row by row: cosine of gradients {float(cosine):.6f}, norms {norms}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on any machine")
    parser.add_argument("--quick", action="store_true", help="only the main variants")
    parser.add_argument("--profile", action="store_true", help="print a profile of a step")
    parser.add_argument(
        "--limit", type=float, default=270, help="seconds after which no new variant is started"
    )
    options = parser.parse_args()
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
    )
    shape = config(options.tiny)
    mean, most = (60, 300) if options.tiny else (600, 3072)
    batch = batch_of(lengths(32 if options.tiny else 512, mean, most), shape.vocab_size)
    fewer = batch_of(lengths(32 if options.tiny else 128, mean, most), shape.vocab_size)
    tokens = sum(len(row) for sample in batch.samples for row in sample.rows)
    print(f"{torch.__version__}, {device}, {tokens:,} tokens in {len(batch.samples)} rows\n")
    table = SpeedTable(shape, device)

    def attempt(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # a variant that fails must not end the run
            traceback.print_exc()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    attempt(lambda: same_gradient(options.tiny, device))
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
