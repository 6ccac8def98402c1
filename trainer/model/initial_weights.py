"""Reads the weights of a Hugging Face folder into a model, tensor by tensor.

Each rank reads only the parts of the files that it holds. transformers knows for each kind of model how
the tensors of a folder become parameters: renamed, or joined, such as the experts of a layer. Joined
tensors are read one parameter at a time, and of experts only those that the rank holds.
"""

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from servicekit.errors import Fatal
from trainer.model.weight_files import Stored, open_weights, stored_shape

Tensor = Any
ADAPTER, ADAPTED = ".lora_", ".base_layer."
"""Parts of the names of an adapter's weights, and of the weights that it was added to."""
MAX_NAMED = 5


class InitialWeights:
    """The weights of a folder for one model, whose own tensors may be sharded."""

    def __init__(self, folder: Path, causal: Any) -> None:
        self._folder = folder
        self._causal = causal
        self._targets = {
            name.replace(ADAPTED, "."): tensor
            for name, tensor in causal.state_dict(keep_vars=True).items()
            if ADAPTER not in name
        }
        """Parameters and buffers, by the names that they have without adapters."""
        self._filled: set[int] = set()

    def read(self) -> None:
        """Overwrites the model's parameters; raises Fatal if the folder has not all of them."""
        with open_weights(self._folder) as stored, torch.no_grad():
            plain, joined = self._find_sources(stored)
            for name, key in plain.items():
                self._fill(name, stored[key], stored_shape(stored[key]))
            for name, converter in joined.items():
                self._fill_joined(name, converter)
        self._check_complete()

    def _find_sources(
        self, stored: Mapping[str, Stored]
    ) -> tuple[dict[str, str], dict[str, WeightConverter]]:
        """For each parameter the stored tensor that it equals, or the converter that makes it, with the
        tensors that it needs."""
        conversions = get_model_conversion_mapping(self._causal)
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        prefix, targets = self._causal.base_model_prefix, self._targets
        plain: dict[str, str] = {}
        joined: dict[str, WeightConverter] = {}
        for key in sorted(stored, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, targets)
            if name not in targets and key in targets:
                name, pattern = key, None
            if name not in targets:
                continue  # a part of the folder's model that this class does not have
            if pattern is None:
                plain[name] = key
            else:
                converter = joined.setdefault(name, copy.deepcopy(by_pattern[pattern]))
                read = partial(stored[key].__getitem__, ...)
                converter.add_tensor(name, key, pattern, read)
        # Weights leave under the names that they came with; see revert_weight_conversion.
        self._causal._weight_conversions = [each for each in conversions if each.was_used()]
        return plain, joined

    def _fill(self, name: str, source: Any, shape: tuple[int, ...]) -> None:
        target = self._targets[name]
        if shape != tuple(target.shape):
            raise Fatal(
                f"model {self._folder} has {name} in the shape {shape}, and its config.json asks for "
                f"{tuple(target.shape)}"
            )
        own = _own_part(target)
        local = _local(target)
        if local.numel():
            local.copy_(source[own])
        self._filled.add(id(target))

    def _fill_joined(self, name: str, converter: WeightConverter) -> None:
        target = self._targets[name]
        if _joins_experts(converter) and isinstance(target, DTensor):
            self._fill_own_experts(target, name, converter)
            return
        made = converter.convert(name, model=self._causal, config=self._causal.config)
        for made_name, tensor in made.items():
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            self._fill(made_name, tensor, tuple(tensor.shape))

    def _fill_own_experts(self, target: Tensor, name: str, converter: WeightConverter) -> None:
        experts, *others = _own_part(target)
        assert all(part.start == 0 for part in others), (
            "models are sharded by their first dimension"
        )
        for pattern, reads in converter.collected_tensors.items():
            converter.collected_tensors[pattern] = reads[experts]
        if experts.start < experts.stop:
            made = converter.convert(name, model=self._causal, config=self._causal.config)
            (tensor,) = made.values()
            _local(target).copy_(tensor)
        self._filled.add(id(target))

    def _check_complete(self) -> None:
        missing = [
            name
            for name, target in self._targets.items()
            if isinstance(target, torch.nn.Parameter) and id(target) not in self._filled
        ]
        if missing:
            more = ", …" if len(missing) > MAX_NAMED else ""
            raise Fatal(
                f"model {self._folder} lacks weights that its config.json asks for: "
                f"{', '.join(missing[:MAX_NAMED])}{more}"
            )


def _own_part(target: Tensor) -> tuple[slice, ...]:
    """The part of the whole tensor that this rank holds."""
    if not isinstance(target, DTensor):
        return tuple(slice(0, size) for size in target.shape)
    sizes, starts = compute_local_shape_and_global_offset(
        target.shape, target.device_mesh, target.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _local(target: Tensor) -> Tensor:
    return target.to_local() if isinstance(target, DTensor) else target


def _joins_experts(converter: WeightConverter) -> bool:
    """Whether each row of the result comes from one expert alone."""
    first, *others = converter.operations
    return (
        len(converter.target_patterns) == 1
        and isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(isinstance(each, Concatenate) and each.dim > 0 for each in others)
    )
