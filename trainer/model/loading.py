"""Loads models from Hugging Face folders, adds LoRA adapters, and writes weights back.

Weights are exported with adapters merged, under the names that the model's own checkpoints use, so that
an engine that can load the folder accepts them.
"""

import copy
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from servicekit.distribution import install_command
from servicekit.errors import Fatal
from trainer.model.sharding import TrainedParameters, gather
from trainer.weights.source import Parameter

Tensor = Any

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}
ADAPTER = ".lora_"


class MissingPackage(Fatal):
    """An optional package is needed but not installed."""


def load(folder: str | Path) -> Any:
    """Loads a causal model in float32 on the CPU, with all weights trainable."""
    transformers_logging.disable_progress_bar()  # the trainer shows its own progress
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    return prepare(model)


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
    except ImportError as error:
        raise MissingPackage(
            f"LoRA needs peft: {install_command('lora')}, or set lora_rank to 0"
        ) from error
    model.requires_grad_(False)
    target_modules = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=target_modules, lora_dropout=0.0)
    inject_adapter_in_model(config, model)


class TrainedWeights:
    """All weights of a model, unsharded, as `weights/` sends them; taken from the float32 masters.

    Every rank has to iterate, since shards are gathered; only one layer is gathered at a time.
    """

    def __init__(self, causal: Any, trained: TrainedParameters, dtype: torch.dtype) -> None:
        self._causal = causal
        self._dtype = dtype
        # Names in the packed model start with the name of its only child.
        masters = {name.partition(".")[2]: weight for name, weight in trained.parameters.items()}
        self._weights = {
            name: masters.get(name, weight) for name, weight in causal.named_parameters()
        }
        self._scalings = _scalings(causal)

    def metadata(self) -> list[Parameter]:
        return [
            Parameter(name, self._dtype, tuple(tensor.shape))
            for names in self._groups()
            for name, tensor in self._as_saved({name: self._empty(name) for name in names}).items()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for names in self._groups():
            merged = {name: self._merged(name).to(self._dtype) for name in names}
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
        weight = gather(self._weights[name])
        module, _, _ = name.rpartition(".base_layer.weight")
        if module not in self._scalings:
            return weight
        down, up = (
            gather(self._weights[f"{module}.lora_{which}.default.weight"]).float()
            for which in ("A", "B")
        )
        return weight.float() + self._scalings[module] * (up @ down)

    def _as_saved(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        plain = {name.replace(".base_layer.", "."): weight for name, weight in weights.items()}
        return dict(revert_weight_conversion(self._causal, plain))


def export(
    source: TrainedWeights, causal: Any, model_folder: str | Path, target: Path, writes: bool = True
) -> None:
    """Writes the weights as a Hugging Face folder. Every rank has to call it; one of them writes."""
    weights: dict[str, Tensor] = {}
    for name, weight in source:
        if writes:
            weights[name] = weight.to("cpu", copy=True).contiguous()
    if not writes:
        return
    from huggingface_hub import save_torch_state_dict

    target.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(causal.config)
    config.dtype = next(iter(weights.values())).dtype
    config.architectures = [type(causal).__name__]
    config.save_pretrained(target)
    save_torch_state_dict(weights, target)
    _copy_other_files(Path(model_folder), target)


def _copy_other_files(model_folder: Path, target: Path) -> None:
    """Copies tokenizer, chat template and generation defaults: files that are neither weights nor
    present."""
    for file in sorted(model_folder.iterdir()):
        is_weights = file.suffix in WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and not (target / file.name).exists():
            shutil.copy2(file, target / file.name)


def _scalings(causal: Any) -> dict[str, float]:
    """The scaling of each module that has an adapter."""
    return {
        name: float(module.scaling["default"])
        for name, module in causal.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "scaling")
    }
