"""Attention over packed rows: no id sees another row, and rows are not padded.

Where rows share their first ids, a pack holds trees, and an id sees its ancestors: those before it
whose subtree has not ended yet.

It is registered with transformers under a name of its own, and models pass the bounds of the rows to it
as they do for flash-attention. What it does not support (a bias, a cap, sinks) raises
PackingUnsupported; `mode_search.py` then uses the model's own attention, row by row.

Kernels: `varlen` (torch's, for bf16 on GPUs, no trees), `flex` (compiled, one block mask per pack),
`rows` (one SDPA call per row or tree, on any device).
"""

import inspect
from typing import Any, Literal

import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None

from trainer.model.pack import Pack
from trainer.model.visibility import block_mask, tree_masks

Tensor = Any
NAME = "steplog_packed"
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments of attention that some models use and the kernels here do not support."""
LARGEST_HEAD = 256
_flex: Any = None
_VARLEN = frozenset(inspect.signature(varlen_attn).parameters) if varlen_attn else frozenset()


def kernels(device: Any, dtype: Any) -> tuple[str, ...]:
    """The kernels that may work on the device, best first."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return ("rows",)
    return ("varlen", "flex", "rows") if varlen_attn else ("flex", "rows")


def tree_kernel(device: Any) -> Literal["flex", "rows"]:
    """The kernel for packs with shared ids."""
    return "flex" if device.type == "cuda" else "rows"


def arguments(pack: Pack, kernel: str) -> dict[str, Any]:
    """The arguments that the model has to pass to its attention layers."""
    bounds = {
        "cu_seq_lens_q": pack.bounds,
        "cu_seq_lens_k": pack.bounds,
        "max_length_q": pack.longest,
        "max_length_k": pack.longest,
    }
    if kernel == "flex":
        _compile_flex()
        return bounds | {"row_blocks": block_mask(pack)}
    if kernel == "rows":
        # Only for this kernel: torch.compile would compile a new program for every list of lengths.
        return bounds | {"row_lengths": pack.lengths, "tree_masks": tree_masks(pack)}
    return bounds


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    row_lengths: tuple[int, ...] | None = None,
    tree_masks: tuple[Tensor | None, ...] = (),
    row_blocks: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention interface of transformers: inputs have heads before positions, outputs after
    them."""
    _check_supported(module, attention_mask, cu_seq_lens_q, others)
    if row_lengths is not None:
        out = _by_rows(query, key, value, row_lengths, tree_masks, scaling, sliding_window)
    elif row_blocks is not None:
        if sliding_window is not None:
            raise PackingUnsupported("flex attention has no sliding window here")
        out = _flex(query, key, value, block_mask=row_blocks, scale=scaling, enable_gqa=True)
    else:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        out = _varlen(q, k, v, cu_seq_lens_q, max_length_q or 0, scaling, sliding_window)
        return out.unsqueeze(0), None
    return out.transpose(1, 2).contiguous(), None


class PackingUnsupported(RuntimeError):
    """A model uses a feature that attention over packed rows does not support."""


def _check_supported(module: Any, mask: Any, bounds: Any, others: dict[str, Any]) -> None:
    if bounds is None:
        raise PackingUnsupported(
            f"{type(module).__name__} does not pass the bounds of rows to its attention"
        )
    causal = others.get("is_causal")
    if (
        mask is not None
        or (getattr(module, "is_causal", True) if causal is None else causal) is False
    ):
        raise PackingUnsupported(f"{type(module).__name__} has a mask of its own")
    used = [name for name in UNSUPPORTED if others.get(name) is not None]
    if used:
        raise PackingUnsupported(f"{type(module).__name__} uses {used[0]}")


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    size, wide = value.shape[-1], query.shape[-1]
    if size < wide:  # the kernel needs the same size for query, key and value
        value = pad(value, (0, wide - size))
    options: dict[str, Any] = {"scale": scaling}
    left = -1 if window is None else window - 1
    if "window_size" in _VARLEN:
        options["window_size"] = (left, 0)
    elif window is None:
        options["is_causal"] = True
    else:
        raise PackingUnsupported("this torch has no sliding window for packed rows")
    if "enable_gqa" in _VARLEN:
        options["enable_gqa"] = True
    else:
        key, value = (_repeated(tensor, query.shape[1]) for tensor in (key, value))
    out = varlen_attn(query, key, value, bounds, bounds, longest, longest, **options)
    return out[..., :size]


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _by_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[int, ...],
    masks: tuple[Tensor | None, ...],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    gqa = query.shape[1] != key.shape[1]
    return torch.cat(
        [
            _one_row(q, k, v, mask, scaling, window, gqa)
            for (q, k, v), mask in zip(parts, masks, strict=True)
        ],
        dim=2,
    )


def _one_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    window: int | None,
    gqa: bool,
) -> Tensor:
    length = query.shape[2]
    if window is not None and window < length:
        if mask is not None:
            raise PackingUnsupported("trees have no sliding window here")
        positions = torch.arange(length, device=query.device)
        distance = positions[:, None] - positions[None, :]
        mask = (distance >= 0) & (distance < window)
    return scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
    )


def _compile_flex() -> None:
    """Compiles flex attention, without which it would hold all scores at once."""
    global _flex
    if _flex is None:
        _flex = torch.compile(flex_attention, dynamic=True)


AttentionInterface.register(NAME, packed_attention)
