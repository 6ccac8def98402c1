"""Many small tensors as a few flat buffers of bytes, cut the same way on both sides.

A buffer takes parameters in their order until it holds more than its size, as vLLM's own packing
does. So both sides find the same cuts from the list of parameters alone.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from trainer.weights.source import Parameter


def cut(parameters: Iterable[Parameter], buffer_bytes: int) -> Iterator[list[Parameter]]:
    """The parameters of each buffer."""
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
    """On the CPU, where the transfer of such buffers is."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8).cpu() for tensor in tensors])


def empty(chunk: Sequence[Parameter]) -> torch.Tensor:
    return torch.empty(sum(parameter.bytes for parameter in chunk), dtype=torch.uint8)


def unpack(flat: torch.Tensor, chunk: Sequence[Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
    parts = flat.split([parameter.bytes for parameter in chunk])
    for parameter, part in zip(chunk, parts, strict=True):
        # A copy, for two reasons: views need an aligned start, which mixed types do not give, and
        # vLLM keeps tensors until their layer is complete, which would hold the whole buffer.
        yield parameter.name, part.clone().view(parameter.dtype).view(parameter.shape)
