"""Flat buffers are split alike on both sides, and nothing of a tensor is lost."""

import torch

from trainer.weights.packing import empty_buffer, pack, split_into_buffers, unpack
from trainer.weights.source import ModuleSource, Parameter, total_bytes


def parameters(*sizes: int) -> list[Parameter]:
    return [Parameter(str(place), torch.uint8, (size,)) for place, size in enumerate(sizes)]


def test_a_buffer_ends_with_the_parameter_that_fills_it() -> None:
    chunks = split_into_buffers(parameters(3, 3, 3, 20, 1), buffer_bytes=5)
    assert [[each.bytes for each in chunk] for chunk in chunks] == [[3, 3], [3, 20], [1]]
    assert list(split_into_buffers([], 5)) == []


def test_tensors_of_any_type_and_shape_come_back() -> None:
    tensors = {
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "half": torch.randn(3, 5).bfloat16(),
        "scalar": torch.tensor(2.5),
        "turned": torch.randn(4, 6).T,
        "none": torch.zeros(0, 3),
    }
    chunk = [Parameter(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]
    flat = pack(tensors.values())
    assert flat.shape == empty_buffer(chunk).shape
    for name, tensor in unpack(flat, chunk):
        assert torch.equal(tensor, tensors[name]) and tensor.dtype == tensors[name].dtype


def test_what_is_announced_is_what_comes() -> None:
    module = torch.nn.Linear(3, 2)
    for dtype in (None, torch.bfloat16):
        source = ModuleSource(module, dtype)
        told = [(each.name, each.dtype, each.shape) for each in source.metadata()]
        assert told == [(name, each.dtype, tuple(each.shape)) for name, each in source]
        assert total_bytes(source) == 8 * (2 if dtype else 4)
        assert not any(each.requires_grad for _, each in source)
