"""Keeps in CPU memory what a GPU needs only now and then, so that longer rows and larger models fit.

Activations: of recomputed layers, only the inputs are kept for the backward pass. They wait in CPU
memory: each is copied there while the next layers run, and back while the layer behind it is
recomputed. Optimizer: AdamW's averages are on the GPU during the optimizer step only, those of some
weights at a time.

Results are the same bit for bit: the same kernels compute the same numbers.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Tensor = Any

CHUNK_BYTES = 2**30
"""Bytes of averages that are on the GPU at a time."""
AVERAGES = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True, eq=False, weakref_slot=True)
class _StoredInput:
    copy: Tensor
    """In CPU memory."""
    previous: "weakref.ref[_StoredInput] | None"
    """The input of the layer before, which the backward pass needs next."""
    loaded: Tensor | None = None


class LayerInputs:
    """The inputs of a model's recomputed layers, in CPU memory between forward and backward pass."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: weakref.ref[_StoredInput] | None = None

    def attach(self, causal: Any) -> None:
        """`causal` is a transformers model whose layers are recomputed."""
        for module in causal.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = self._run_layer

    def _run_layer(self, layer: Any, *inputs: Any, **options: Any) -> Any:
        # Inside, the hooks of `checkpoint` hold: only the inputs of the layer reach ours.
        with saved_tensors_hooks(self._store, self._load):
            return checkpoint(layer, *inputs, use_reentrant=False, **options)

    def _store(self, tensor: Tensor) -> "_StoredInput | Tensor":
        if tensor.device.type != self._device.type:
            return tensor  # `checkpoint` itself saves an empty tensor, on the CPU
        copy = torch.empty_like(tensor, device="cpu", pin_memory=self._stream is not None)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            copy.copy_(tensor, non_blocking=True)
        stored = _StoredInput(copy, self._last)
        self._last = weakref.ref(stored)
        return stored

    def _load(self, stored: "_StoredInput | Tensor") -> Tensor:
        if not isinstance(stored, _StoredInput):
            return stored
        self._fetch(stored)
        tensor, stored.loaded = stored.loaded, None
        assert tensor is not None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            tensor.record_stream(current)
        previous = stored.previous() if stored.previous is not None else None
        if previous is not None:
            self._fetch(previous)
        return tensor

    def _fetch(self, stored: _StoredInput) -> None:
        if stored.loaded is None:
            with torch.cuda.stream(self._stream):
                stored.loaded = stored.copy.to(self._device, non_blocking=True)


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with its averages in CPU memory. A step consumes the gradients."""

    def step(self, closure: Any = None) -> None:
        assert closure is None
        weights = [w for group in self.param_groups for w in group["params"] if w.grad is not None]
        gradients = {weight: weight.grad for weight in weights}
        for weight in weights:
            weight.grad = None  # AdamW leaves out weights without a gradient
        for chunk in _chunks(weights):
            for weight in chunk:
                weight.grad = gradients.pop(weight)
                self._move(weight, weight.device)
            super().step()
            for weight in chunk:
                weight.grad = None
                self._move(weight, torch.device("cpu"))
        if weights and weights[0].is_cuda:
            torch.cuda.synchronize(weights[0].device)  # whoever reads the averages does not wait

    def _move(self, weight: Tensor, device: Any) -> None:
        state = self.state[weight]
        for field in AVERAGES:
            if field in state and state[field].device != device:
                state[field] = _copy_to(state[field], device)


def empty_average(weight: Tensor, *, is_offloaded: bool) -> Tensor:
    """Memory for one of AdamW's averages, in the shape of its weight."""
    if not is_offloaded:
        return torch.zeros_like(weight.detach())
    return torch.zeros_like(weight.detach(), device="cpu", pin_memory=weight.is_cuda)


def _copy_to(tensor: Tensor, device: Any) -> Tensor:
    if device.type != "cpu":
        return tensor.to(device, non_blocking=True)
    copy = torch.empty_like(tensor, device=device, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


def _chunks(weights: list[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    size = 0
    for weight in weights:
        chunk.append(weight)
        size += len(AVERAGES) * weight.numel() * weight.element_size()
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
