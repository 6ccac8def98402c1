"""The model of the GPU benchmark, and the speed of steps with it."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench.shapes import QWEN_05B

PEAK = 790e12
"""Floating point operations per second of bf16 that a matrix product reaches on an H200."""
MEASURED_STEPS = 3
GIB = 2**30
TINY = {
    "vocab_size": 263,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config(tiny: bool) -> Any:
    return Qwen2Config(
        **(TINY if tiny else QWEN_05B),
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )


def model(tiny: bool, device: Any, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        made = Qwen2ForCausalLM(config(tiny))
    return made.to(dtype)


def operations(shape: Any, tokens: int, squares: int, trained: int) -> float:
    """Floating point operations of a step without recomputation: 6 per weight and token, plus
    attention. `squares` is the sum of squared row lengths; ids that rows share count once."""
    wide, size = shape.hidden_size, shape.hidden_size // shape.num_attention_heads
    linear = (
        2 * wide * (wide + size * shape.num_key_value_heads) + 3 * wide * shape.intermediate_size
    )
    layers = shape.num_hidden_layers
    head = 6 * wide * shape.vocab_size * trained
    return float(6 * layers * (linear * tokens + wide * squares) + head)


class SpeedTable:
    """Prints a line for every measured step."""

    def __init__(self, shape: Any, device: Any) -> None:
        self._shape, self._is_gpu = shape, device.type == "cuda"
        self.best = 0.0
        self.usual = 0.0

    def measure(
        self,
        name: str,
        batch: Any,
        step: Callable[[], Any],
        computed: tuple[int, int] | None = None,
    ) -> float:
        """Tokens of rows per second. `computed` has the tokens and squares that the step computes, if
        these are not the rows'."""
        rows = [row for sample in batch.samples for row in sample.rows]
        tokens, squares = sum(map(len, rows)), sum(len(row) ** 2 for row in rows)
        trained = sum(int(row.trainable.sum()) for row in rows)
        self._forget_peak()
        first = self._seconds(step)
        seconds = min(self._seconds(step) for _ in range(MEASURED_STEPS))
        work = operations(self._shape, *(computed or (tokens, squares)), trained)
        gpu = f"{work / seconds / PEAK:6.1%} MFU {self._peak():7.1f} GiB "
        print(
            f"{name:46}{tokens / seconds:12,.0f} tokens/s {gpu if self._is_gpu else ''}"
            f"{seconds:7.2f} s a step, the first {first:6.1f} s",
            flush=True,
        )
        return tokens / seconds

    def _seconds(self, step: Callable[[], Any]) -> float:
        began = self._now()
        step()
        return self._now() - began

    def _now(self) -> float:
        if self._is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _forget_peak(self) -> None:
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> float:
        return torch.cuda.max_memory_allocated() / GIB if self._is_gpu else 0.0
