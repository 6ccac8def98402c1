"""Attention of packed rows: no id sees another row, and nothing is padded.

It is registered with transformers under one name, and models pass the bounds of the rows on to it as
they do for flash-attention. Whatever it cannot do (a bias, a cap, sinks) it refuses by name; the
check of `probing.py` then takes the model's own attention, row by row.

Kernels: `varlen` (torch's, bf16 on GPUs), `flex` (compiled, one block mask per pack), `rows` (one
call of SDPA per row, anywhere).
"""

import inspect
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None

from trainer.model.pack import Pack

Tensor = Any
NAME = "steplog_packed"
REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")
"""What some models add to attention and the kernels here do not have."""
LARGEST_HEAD = 256
_VARLEN = frozenset(inspect.signature(varlen_attn).parameters) if varlen_attn else frozenset()
_flex: Any = None


def kernels(device: Any, dtype: Any) -> tuple[str, ...]:
    """Those that may work there, best first."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return ("rows",)
    return ("varlen", "flex", "rows") if varlen_attn else ("flex", "rows")


def arguments(pack: Pack, kernel: str) -> dict[str, Any]:
    """What the model has to pass on to its attention layers."""
    bounds = {
        "cu_seq_lens_q": pack.bounds,
        "cu_seq_lens_k": pack.bounds,
        "max_length_q": pack.longest,
        "max_length_k": pack.longest,
    }
    if kernel == "flex":
        return bounds | {"row_blocks": _row_blocks(pack)}
    if kernel == "rows":
        # Only here: under torch.compile every new list of numbers would be a new program.
        return bounds | {"row_lengths": pack.lengths}
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
    row_blocks: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: heads before positions on the way in, after them on the way out."""
    _refuse(module, attention_mask, cu_seq_lens_q, others)
    if row_lengths is not None:
        out = _by_rows(query, key, value, row_lengths, scaling, sliding_window)
    elif row_blocks is not None:
        if sliding_window is not None:
            raise Unpackable("flex attention has no sliding window here")
        out = _flex(query, key, value, block_mask=row_blocks, scale=scaling, enable_gqa=True)
    else:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        out = _varlen(q, k, v, cu_seq_lens_q, max_length_q or 0, scaling, sliding_window)
        return out.unsqueeze(0), None
    return out.transpose(1, 2).contiguous(), None


class Unpackable(RuntimeError):
    """A model asks for what packed rows cannot have; `probing` then takes another way."""


def _refuse(module: Any, mask: Any, bounds: Any, others: dict[str, Any]) -> None:
    if bounds is None:
        raise Unpackable(f"{type(module).__name__} does not pass on where rows begin")
    causal = others.get("is_causal")
    if (
        mask is not None
        or (getattr(module, "is_causal", True) if causal is None else causal) is False
    ):
        raise Unpackable(f"{type(module).__name__} has a mask of its own")
    found = [name for name in REFUSED if others.get(name) is not None]
    if found:
        raise Unpackable(f"{type(module).__name__} uses {found[0]}")


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
    if size < wide:  # the kernel has one size for all three
        value = pad(value, (0, wide - size))
    options: dict[str, Any] = {"scale": scaling}
    left = -1 if window is None else window - 1
    if "window_size" in _VARLEN:
        options["window_size"] = (left, 0)
    elif window is None:
        options["is_causal"] = True
    else:
        raise Unpackable("this torch has no sliding window for packed rows")
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
    scaling: float | None,
    window: int | None,
) -> Tensor:
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    gqa = query.shape[1] != key.shape[1]
    return torch.cat(
        [_one_row(q, k, v, scaling, window, gqa) for q, k, v in parts],
        dim=2,
    )


def _one_row(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, gqa: bool
) -> Tensor:
    length, mask = query.shape[2], None
    if window is not None and window < length:
        places = torch.arange(length, device=query.device)
        behind = places[:, None] - places[None, :]
        mask = (behind >= 0) & (behind < window)
    return scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
    )


def _row_blocks(pack: Pack) -> Any:
    """Which blocks of the pack have to look at which."""
    global _flex
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if _flex is None:
        _flex = torch.compile(flex_attention, dynamic=True)
    lengths = pack.bounds.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)

    def visible(_batch: Any, _head: Any, place: Tensor, seen: Tensor) -> Tensor:
        return (rows[place] == rows[seen]) & (place >= seen)

    size = len(pack.ids)
    return create_block_mask(visible, None, None, size, size, device=str(pack.ids.device))


AttentionInterface.register(NAME, packed_attention)
