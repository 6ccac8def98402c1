"""Settings of a training step beside each other, and the usual loop with padded rows."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bench.training import padded_loop
from bench.training.speed import GIB, SpeedTable, model
from trainer.algorithm.settings import LossSettings
from trainer.learner import Learner
from trainer.model import attention, logprobs
from trainer.model.settings import ExecutionSettings, LearnerSettings


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
