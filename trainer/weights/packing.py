"""Packs many small tensors into a few flat byte buffers, split the same way on both sides.

A buffer takes parameters in order until it exceeds its size, as in vLLM's own packing. Both sides
therefore compute the same buffers from the list of parameters alone.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from trainer.weights.source import Parameter


def split_into_buffers(
    parameters: Iterable[Parameter], buffer_bytes: int
) -> Iterator[list[Parameter]]:
    """Yields the parameters of each buffer."""
    chunk: list[Parameter] = []
    size = 0
    for parameter in parameters:
        chunk.append(parameter)
        size += parameter.bytes
        if size > buffer_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def pack(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One flat buffer on the CPU, where gloo transfers it."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8).cpu() for tensor in tensors])


def empty_buffer(chunk: Sequence[Parameter]) -> torch.Tensor:
    return torch.empty(sum(parameter.bytes for parameter in chunk), dtype=torch.uint8)


def unpack(flat: torch.Tensor, chunk: Sequence[Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
    parts = flat.split([parameter.bytes for parameter in chunk])
    for parameter, part in zip(chunk, parts, strict=True):
        # Copied for two reasons: a view needs an aligned start, which mixed types do not give; and
        # vLLM keeps tensors until their layer is complete, which would keep the whole buffer.
        yield parameter.name, part.clone().view(parameter.dtype).view(parameter.shape)
