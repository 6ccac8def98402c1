"""Models of Hugging Face folders: loaded, given adapters, written back.

Weights leave under the names that the model's own checkpoints have, adapters merged, so that an
engine that can load the folder can take them.
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
from trainer.model.sharding import Held, whole
from trainer.weights.source import Parameter

Tensor = Any

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}
ADAPTER = ".lora_"


class MissingPackage(Fatal):
    """An optional package is needed, and is not installed."""


def load(folder: str | Path) -> Any:
    """A causal model in float32 on the CPU, ready to be trained in full."""
    transformers_logging.disable_progress_bar()  # the trainer shows its own progress
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    return prepared(model)


def prepared(model: Any) -> Any:
    """Dropout would make the log-probs of training differ from those of sampling."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    return model


def add_lora(model: Any, rank: int, alpha: float, targets: Sequence[str] | str) -> None:
    """Trains two thin matrices beside each target in place of the model's weights."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingPackage(
            f"LoRA needs peft: {install_command('lora')}, or set lora_rank to 0"
        ) from error
    model.requires_grad_(False)
    chosen = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, lora_dropout=0.0)
    inject_adapter_in_model(config, model)


class TrainedWeights:
    """All weights of a model, whole, as `weights/` sends them; reads the masters where there are some.

    Every rank has to iterate, since shards are gathered; one layer is whole at a time.
    """

    def __init__(self, causal: Any, held: Held, dtype: torch.dtype) -> None:
        self._causal = causal
        self._dtype = dtype
        # Names in the packed model begin with that of its only child.
        masters = {name.partition(".")[2]: weight for name, weight in held.parameters.items()}
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
        """Names of one layer together: experts are saved apart and computed as one."""
        groups: dict[str, list[str]] = {}
        for name in self._weights:
            if ADAPTER not in name:
                found = re.match(r"(.*?\.\d+\.)", name)
                groups.setdefault(found[1] if found else name, []).append(name)
        return list(groups.values())

    def _empty(self, name: str) -> Tensor:
        return torch.empty(self._weights[name].shape, dtype=self._dtype, device="meta")

    def _merged(self, name: str) -> Tensor:
        weight = whole(self._weights[name])
        module, _, _ = name.rpartition(".base_layer.weight")
        if module not in self._scalings:
            return weight
        down, up = (
            whole(self._weights[f"{module}.lora_{which}.default.weight"]).float()
            for which in ("A", "B")
        )
        return weight.float() + self._scalings[module] * (up @ down)

    def _as_saved(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        plain = {name.replace(".base_layer.", "."): weight for name, weight in weights.items()}
        told = revert_weight_conversion(self._causal, plain)
        return dict(told)


def export(
    source: TrainedWeights, causal: Any, model_folder: str | Path, target: Path, writes: bool = True
) -> None:
    """A Hugging Face folder of the weights as they are; every rank calls it, one of them writes."""
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
    _copy_beside(Path(model_folder), target)


def _copy_beside(model_folder: Path, target: Path) -> None:
    """Tokenizer, chat template, defaults of generation: all that is neither weights nor there."""
    for file in sorted(model_folder.iterdir()):
        is_weights = file.suffix in WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and not (target / file.name).exists():
            shutil.copy2(file, target / file.name)


def _scalings(causal: Any) -> dict[str, float]:
    """Of each module with an adapter."""
    return {
        name: float(module.scaling["default"])
        for name, module in causal.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "scaling")
    }
