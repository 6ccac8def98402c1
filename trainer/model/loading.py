"""Builds models from Hugging Face folders, adds LoRA adapters, and gives out the trained weights.

Weights leave with adapters merged, under the names that the model's own checkpoints use, so that an
engine that can load the folder accepts them.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from servicekit.distribution import install_command
from servicekit.errors import Fatal
from trainer.model.adapters import find_adapters, parameter_name, round_at_random
from trainer.model.initial_weights import ADAPTED, ADAPTER
from trainer.model.sharding import TrainedParameters, gather
from trainer.weights.source import Parameter

Tensor = Any


class MissingPackage(Fatal):
    """An optional package is needed but not installed."""


def build(folder: str | Path) -> Any:
    """Builds the causal model of a folder in float32 without its weights: parameters are on the meta
    device, and buffers, such as the frequencies of positions, have their values."""
    config = AutoConfig.from_pretrained(str(folder))
    if getattr(config, "quantization_config", None):
        raise Fatal(
            f"model {folder} is quantized, and quantized weights cannot be trained; "
            "use the folder of the model that it was made from"
        )
    with _parameters_on_meta():
        return prepare(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def register_on_meta(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


def prepare(model: Any) -> Any:
    """Sets the model to training without dropout, which would make its log-probs differ from
    sampling."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    return model


def add_lora(model: Any, rank: int, alpha: float, targets: Sequence[str] | str) -> None:
    """Adds LoRA adapters to the target modules and freezes all other weights."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    except ImportError as error:
        raise MissingPackage(
            f"LoRA needs peft: {install_command('lora')}, or set lora_rank to 0"
        ) from error
    model.requires_grad_(False)
    target_modules = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=target_modules, lora_dropout=0.0)
    inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            _initialise(module)


def _initialise(adapter: Any) -> None:
    """Gives an adapter on the meta device its values, the same for a seed as peft does elsewhere. It is
    small, so each rank makes it whole, which gives the same values on any number of ranks."""
    for kind in adapter.adapter_layer_names:
        layers = getattr(adapter, kind).to_empty(device="cpu")
        for layer in layers.children():
            layer.reset_parameters()
    adapter.reset_lora_parameters("default", init_lora_weights=True)


class TrainedWeights:
    """All weights of a model, unsharded, as `weights/` sends them; taken from the float32 masters.

    Every rank has to iterate, since shards are gathered; only one layer is gathered at a time. Shards
    are cast before they are gathered, which gives the same values with half of the traffic.
    """

    def __init__(
        self,
        causal: Any,
        trained: TrainedParameters,
        dtype: torch.dtype,
        steps: Callable[[], int],
    ) -> None:
        """`steps` returns the number of optimizer steps, which decides how merged weights are
        rounded."""
        self._causal = causal
        self._steps = steps
        self._dtype = dtype
        # Names in the packed model start with the name of its only child.
        masters = {name.partition(".")[2]: weight for name, weight in trained.parameters.items()}
        self._weights = {
            name: masters.get(name, weight) for name, weight in causal.named_parameters()
        }
        self._scalings = find_adapters(causal)

    def metadata(self) -> list[Parameter]:
        return [
            Parameter(name, self._dtype, tuple(tensor.shape))
            for names in self._groups()
            for name, tensor in self._as_saved({name: self._empty(name) for name in names}).items()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for names in self._groups():
            merged = {name: self._merged(name) for name in names}
            yield from self._as_saved(merged).items()

    def _groups(self) -> list[list[str]]:
        """The names of each layer as one group: experts are computed together but saved separately."""
        groups: dict[str, list[str]] = {}
        for name in self._weights:
            if ADAPTER not in name:
                layer = re.match(r"(.*?\.\d+\.)", name)
                groups.setdefault(layer[1] if layer else name, []).append(name)
        return list(groups.values())

    def _empty(self, name: str) -> Tensor:
        return torch.empty(self._weights[name].shape, dtype=self._dtype, device="meta")

    def _merged(self, name: str) -> Tensor:
        weight = self._weights[name]
        module, _, _ = name.rpartition(".base_layer.weight")
        if module not in self._scalings:
            return gather(weight.to(self._dtype))
        down, up = (
            gather(self._weights[parameter_name(module, matrix)]).float() for matrix in "AB"
        )
        merged = gather(weight).float() + self._scalings[module] * (up @ down)
        return round_at_random(merged, self._dtype, f"{self._steps()} {name}")

    def _as_saved(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        plain = {name.replace(ADAPTED, "."): weight for name, weight in weights.items()}
        return dict(revert_weight_conversion(self._causal, plain))
