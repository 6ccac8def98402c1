"""A causal language model that takes packs and returns the log-probs of their trainable ids.

Everything from ids to log-probs happens in one forward call of this module: the weights of a sharded
model, including those of the head, are complete only during that call.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import embedding

from trainer.model import attention
from trainer.model.logprobs import logprobs_of_logits, token_logprobs
from trainer.model.pack import Pack

Tensor = Any


@dataclass(frozen=True, slots=True)
class ExecutionMode:
    """How a model is run; `mode_search.py` finds the fastest correct one."""

    kernel: Literal["varlen", "flex", "rows", "single"]
    """The attention kernel for packs; `single` runs every row on its own, with the model's
    attention."""
    head: Literal["chunked", "full"]
    """`full` lets the model compute its logits itself, with whatever it does to them."""
    trees: Literal["flex", "rows"] | None = None
    """The attention kernel for packs in which rows share ids; None if every row has to be whole."""

    @property
    def supports_trees(self) -> bool:
        """Whether trees are possible at all. The full head selects hidden states itself; where rows
        part it would select one several times, and its gradient would not be deterministic."""
        return self.kernel != "single" and self.head == "chunked"


class PackedModel(nn.Module):
    """`causal` is a transformers model for causal language modeling."""

    def __init__(self, causal: Any, *, fp32_head: bool = False, compiled: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.fp32_head = fp32_head
        self.compiled = compiled
        self.mode = ExecutionMode("single", "full")
        self.layers = _layers(causal)
        """The repeating blocks, each of which is sharded, compiled and recomputed as one."""
        self._own_attention = causal.config._attn_implementation
        self._has_logits_to_keep = "logits_to_keep" in inspect.signature(causal.forward).parameters

    def forward(self, pack: Pack, mode: ExecutionMode | None = None) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of each trainable id."""
        mode = mode or self.mode
        assert mode.trees or not pack.is_shared, "this mode needs every row whole"
        single = mode.kernel == "single"
        self.causal.config._attn_implementation = self._own_attention if single else attention.NAME
        if mode.head == "full":
            logits = self._single_logits(pack) if single else self._packed_logits(pack, mode)
            return logprobs_of_logits(logits, pack.targets, pack.temperatures)
        hidden = self._single_hidden(pack) if single else self._packed_hidden(pack, mode)
        return self._from_hidden(hidden, pack)

    def compile_layers(self) -> None:
        """Compiles each layer. All layers share one program, so it takes as long as for a single
        one."""
        self.compiled = True
        for layer in self.layers:
            layer.compile(dynamic=True)

    @property
    def equal_length(self) -> int:
        """Row length at which attention costs as much as the rest of a layer, whose matrices have about
        12 times the square of the hidden size. Only the balance of packs depends on it."""
        return 12 * int(self.causal.config.get_text_config().hidden_size)

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

    def _packed_hidden(self, pack: Pack, mode: ExecutionMode) -> Tensor:
        return self.causal.base_model(**_inputs(pack, mode)).last_hidden_state[0]

    def _packed_logits(self, pack: Pack, mode: ExecutionMode) -> Tensor:
        return self._logits(_inputs(pack, mode), pack.predicting)

    def _single_hidden(self, pack: Pack) -> Tensor:
        rows = pack.ids[None].split(pack.lengths, dim=1)
        outputs = [self.causal.base_model(input_ids=row, use_cache=False) for row in rows]
        return torch.cat([output.last_hidden_state[0] for output in outputs])

    def _single_logits(self, pack: Pack) -> Tensor:
        rows = pack.ids[None].split(pack.lengths, dim=1)
        positions = [pack.positions[part] for part in pack.predicting.split(pack.counts)]
        logits = [
            self._logits({"input_ids": row, "use_cache": False}, predicting)
            for row, predicting in zip(rows, positions, strict=True)
        ]
        return torch.cat(logits)

    def _logits(self, inputs: dict[str, Any], positions: Tensor) -> Tensor:
        if self._has_logits_to_keep:
            return self.causal(**inputs, logits_to_keep=positions).logits[0]
        return self.causal(**inputs).logits[0][positions]

    def _from_hidden(self, hidden: Tensor, pack: Pack) -> tuple[Tensor, Tensor]:
        head = self.causal.get_output_embeddings()
        return token_logprobs(
            # With repeated indices, the gradient of hidden[indices] is not deterministic on CPUs.
            embedding(pack.predicting, hidden),
            head.weight,
            getattr(head, "bias", None),
            pack.targets,
            pack.temperatures,
            fp32=self.fp32_head,
            compiled=self.compiled and hidden.is_cuda,
        )


def _inputs(pack: Pack, mode: ExecutionMode) -> dict[str, Any]:
    kernel = mode.trees if pack.is_shared and mode.trees else mode.kernel
    return {
        "input_ids": pack.ids[None],
        "position_ids": pack.positions[None],
        "use_cache": False,
        **attention.arguments(pack, kernel),
    }


def _layers(causal: Any) -> list[Any]:
    """To be called before sharding, which changes the names of classes."""
    names = set(getattr(causal, "_no_split_modules", None) or ())
    blocks = [module for module in causal.modules() if type(module).__name__ in names]
    inner = {id(part) for module in blocks for part in module.modules() if part is not module}
    lists = [module for module in causal.modules() if isinstance(module, nn.ModuleList)]
    outer = [module for module in blocks if id(module) not in inner]
    return outer or list(max(lists, key=len, default=[]))
