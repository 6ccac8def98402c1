"""Writes trained weights as a Hugging Face folder, file by file.

At no time is more than one file's worth of weights in memory. Every rank has to take part, because
sharded weights are gathered; one of them writes.
"""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainer.model.initial_weights import ADAPTER
from trainer.weights.source import Parameter, WeightSource

Tensor = Any

FILE_BYTES = 4 * 2**30
OTHER_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}
SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_folder(
    source: WeightSource, causal: Any, model_folder: Path, target: Path, writes: bool
) -> None:
    """`causal` is the model whose weights `source` has; files that are not weights, such as the
    tokenizer's, are copied from `model_folder`."""
    if not writes:
        for _ in source:
            pass
        return
    target.mkdir(parents=True, exist_ok=True)
    parameters = source.metadata()
    config = copy.deepcopy(causal.config)
    config.dtype = parameters[0].dtype
    config.architectures = [type(causal).__name__]
    config.save_pretrained(target)
    _write_weights(source, parameters, _buffers(causal), target)
    _copy_other_files(model_folder, target)


def _write_weights(
    source: WeightSource, parameters: list[Parameter], buffers: dict[str, Tensor], target: Path
) -> None:
    files = _assign_files(parameters)
    count = len(set(files.values()))
    names = [_file_name(number, count) for number in range(count)]
    for number, weights in _by_file(source, files):
        save_file(weights | (buffers if number == 0 else {}), target / names[number], _METADATA)
    if count > 1:
        total = sum(parameter.bytes for parameter in parameters)
        weight_map = {name: names[number] for name, number in files.items()}
        weight_map |= dict.fromkeys(buffers, names[0])
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2))


_METADATA = {"format": "pt"}


def _assign_files(parameters: list[Parameter]) -> dict[str, int]:
    """The number of the file for each weight; a file is full at FILE_BYTES."""
    numbers: dict[str, int] = {}
    number, size = 0, 0
    for parameter in parameters:
        if size and size + parameter.bytes > FILE_BYTES:
            number, size = number + 1, 0
        numbers[parameter.name] = number
        size += parameter.bytes
    return numbers


def _by_file(
    source: WeightSource, files: dict[str, int]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The weights of each file in turn, on the CPU."""
    number = 0
    weights: dict[str, Tensor] = {}
    for name, weight in source:
        if files[name] != number:
            yield number, weights
            number, weights = files[name], {}
        weights[name] = weight.to("cpu", copy=True).contiguous()
    yield number, weights


def _file_name(number: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def _buffers(causal: Any) -> dict[str, Tensor]:
    """Buffers that belong to the weights of a model, such as the biases that balance its experts."""
    parameters = {name for name, _ in causal.named_parameters(remove_duplicate=False)}
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in causal.state_dict().items()
        if name not in parameters and ADAPTER not in name and isinstance(tensor, torch.Tensor)
    }


def _copy_other_files(model_folder: Path, target: Path) -> None:
    """Copies tokenizer, chat template and generation defaults: files that are neither weights nor
    present."""
    for file in sorted(model_folder.iterdir()):
        is_weights = file.suffix in OTHER_WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and not (target / file.name).exists():
            shutil.copy2(file, target / file.name)
