"""A causal language model that reads packs and gives the log-probs of their trainable ids.

Everything from ids to log-probs happens in one forward of this module: when it is sharded, its
weights, those of the head too, are whole only in there.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from trainer.model import attention
from trainer.model.logprobs import logprobs_of_logits, token_logprobs
from trainer.model.pack import Pack

Tensor = Any


@dataclass(frozen=True, slots=True)
class Way:
    """How a model is run; `probing.py` finds the best one that is right."""

    kernel: Literal["varlen", "flex", "rows", "single"]
    """Attention over a pack; `single`: every row in a pass of its own, with the model's attention."""
    head: Literal["chunked", "full"]
    """`full`: the model computes its logits itself, with whatever it does to them."""


class PackedModel(nn.Module):
    """`causal`: a model of transformers for causal language modelling."""

    def __init__(self, causal: Any, *, fp32_head: bool = False, compiled: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.fp32_head = fp32_head
        self.compiled = compiled
        self.way = Way("single", "full")
        self.layers = _layers(causal)
        """The blocks that repeat: what is sharded, compiled and recomputed as one."""
        self._own_attention = causal.config._attn_implementation
        self._keeps = "logits_to_keep" in inspect.signature(causal.forward).parameters

    def forward(self, pack: Pack, way: Way | None = None) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of each trainable id."""
        way = way or self.way
        single = way.kernel == "single"
        self.causal.config._attn_implementation = self._own_attention if single else attention.NAME
        if way.head == "full":
            logits = self._single_logits(pack) if single else self._packed_logits(pack, way)
            return logprobs_of_logits(logits, pack.targets, pack.temperatures)
        hidden = self._single_hidden(pack) if single else self._packed_hidden(pack, way)
        return self._from_hidden(hidden, pack)

    def compile_layers(self) -> None:
        """Layer by layer: all are one program, so compiling takes as long as for one."""
        self.compiled = True
        for layer in self.layers:
            layer.compile(dynamic=True)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """The model as it was before LoRA."""
        # peft's own switch would also take the adapters out of training.
        adapted = [module for module in self.modules() if hasattr(module, "lora_A")]
        for module in adapted:
            module._disable_adapters = True
        try:
            yield
        finally:
            for module in adapted:
                module._disable_adapters = False

    def _packed_hidden(self, pack: Pack, way: Way) -> Tensor:
        return self.causal.base_model(**_inputs(pack, way)).last_hidden_state[0]

    def _packed_logits(self, pack: Pack, way: Way) -> Tensor:
        return self._logits(_inputs(pack, way), pack.predicting)

    def _single_hidden(self, pack: Pack) -> Tensor:
        rows = pack.ids[None].split(pack.lengths, dim=1)
        told = [self.causal.base_model(input_ids=row, use_cache=False) for row in rows]
        return torch.cat([output.last_hidden_state[0] for output in told])

    def _single_logits(self, pack: Pack) -> Tensor:
        rows = pack.ids[None].split(pack.lengths, dim=1)
        places = [pack.positions[part] for part in pack.predicting.split(pack.counts)]
        told = [
            self._logits({"input_ids": row, "use_cache": False}, wanted)
            for row, wanted in zip(rows, places, strict=True)
        ]
        return torch.cat(told)

    def _logits(self, inputs: dict[str, Any], places: Tensor) -> Tensor:
        if self._keeps:
            return self.causal(**inputs, logits_to_keep=places).logits[0]
        return self.causal(**inputs).logits[0][places]

    def _from_hidden(self, hidden: Tensor, pack: Pack) -> tuple[Tensor, Tensor]:
        head = self.causal.get_output_embeddings()
        return token_logprobs(
            hidden[pack.predicting],
            head.weight,
            getattr(head, "bias", None),
            pack.targets,
            pack.temperatures,
            fp32=self.fp32_head,
            compiled=self.compiled and hidden.is_cuda,
        )


def _inputs(pack: Pack, way: Way) -> dict[str, Any]:
    return {
        "input_ids": pack.ids[None],
        "position_ids": pack.positions[None],
        "use_cache": False,
        **attention.arguments(pack, way.kernel),
    }


def _layers(causal: Any) -> list[Any]:
    """Asked before sharding, which changes the names of classes."""
    names = set(getattr(causal, "_no_split_modules", None) or ())
    found = [module for module in causal.modules() if type(module).__name__ in names]
    inner = {id(part) for module in found for part in module.modules() if part is not module}
    lists = [module for module in causal.modules() if isinstance(module, nn.ModuleList)]
    outer = [module for module in found if id(module) not in inner]
    return outer or list(max(lists, key=len, default=[]))
