"""How much GPU memory training takes, computed from the shape of a model and the settings.

For decoders of the usual form (attention, then a gated MLP) on GPUs, in bf16 with float32 masters. All
sizes are bytes on one GPU. What a compiled layer keeps per token was counted with torch's partitioner;
`python -m bench.training.memory --measure` compares the sum with a real step.
"""

from dataclasses import dataclass
from typing import Any

from trainer.model.settings import ExecutionSettings

GIB = 2**30
BF16, FLOAT32 = 2, 4
LOGITS = 3 * GIB
"""A chunk of float32 logits and its gradient in bf16; see `logprobs.CHUNK_BYTES`."""
OFFLOADED_CHUNK = 1 * GIB
"""AdamW's averages that are on the GPU at a time if they are offloaded."""
RESERVED = 2 * GIB
"""What CUDA and NCCL take for themselves."""
USABLE = 0.92
"""Share of the rest that torch's allocator can use before fragments are in its way."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_size: int = 128
    is_tied: bool = False
    """Whether the output head is the embedding."""

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """`config` is that of a transformers model."""
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            vocabulary=config.vocab_size,
            head_size=size,
            is_tied=config.tie_word_embeddings,
        )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def layer_weights(self) -> int:
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def outer_weights(self) -> int:
        """Embedding and output head."""
        return (1 if self.is_tied else 2) * self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        return self.layers * self.layer_weights + self.outer_weights

    def adapter_weights(self, rank: int) -> int:
        """Weights of LoRA adapters on all linear layers."""
        attention = 4 * self.hidden + 2 * self.query_width + 2 * self.kv_width
        return self.layers * rank * (attention + 3 * (self.hidden + self.intermediate))

    def layer_activations(self, *, compiled: bool) -> int:
        """What a layer keeps of a token for its backward pass: the inputs of its matrix products and
        of attention. Without compilation also what lies in between, some of it in float32."""
        attention = 2 * self.query_width + 2 * self.kv_width
        residual, mlp = (4, 3) if compiled else (8, 4)
        return BF16 * (residual * self.hidden + attention + mlp * self.intermediate)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    weights: int
    gradients: int
    optimiser: int
    gathered: int
    """Weights and gradients of the layers that FSDP has gathered."""
    per_token: int
    """Activations of each token of a pack."""
    working: int
    """The largest of the rest: logits with the gradient of the head."""

    @property
    def fixed(self) -> int:
        return self.weights + self.gradients + self.optimiser + self.gathered + self.working

    def total(self, tokens: int) -> int:
        """With packs of this many tokens."""
        return self.fixed + tokens * self.per_token

    def longest_pack(self, gpu_bytes: int) -> int:
        """Most tokens in a pack, and so in a row, on such a GPU; 0 if the model does not fit."""
        free = int((gpu_bytes - RESERVED) * USABLE) - self.fixed
        return max(0, free // self.per_token)


def estimate_memory(
    shape: ModelShape, execution: ExecutionSettings, *, ranks: int = 1, lora_rank: int = 0
) -> MemoryEstimate:
    trained = shape.adapter_weights(lora_rank) if lora_rank else shape.weights
    masters = FLOAT32 * trained
    if ranks == 1:
        weights = BF16 * shape.weights + masters
    else:
        weights = FLOAT32 * (shape.weights + (trained if lora_rank else 0)) // ranks
    head = 0 if lora_rank else 2 * FLOAT32 * shape.vocabulary * shape.hidden
    averages = OFFLOADED_CHUNK if execution.offload_optimiser else 2 * masters // ranks
    return MemoryEstimate(
        weights=weights,
        gradients=masters // ranks,
        optimiser=averages,
        gathered=_gathered(shape, lora_rank) if ranks > 1 else 0,
        per_token=_per_token(shape, execution),
        working=LOGITS + head,
    )


def _gathered(shape: ModelShape, lora_rank: int) -> int:
    """Two layers and the outer weights in bf16; if they are trained, also the gradients of two layers,
    in bf16 and in float32 while ranks sum them."""
    weights = BF16 * (2 * shape.layer_weights + shape.outer_weights)
    gradients = 0 if lora_rank else (BF16 + FLOAT32) * 2 * shape.layer_weights
    return weights + gradients


def _per_token(shape: ModelShape, execution: ExecutionSettings) -> int:
    layer = shape.layer_activations(compiled=execution.compile)
    # A layer's backward pass also holds the gradients of its activations; the head, hidden states.
    in_progress = BF16 * (3 * shape.intermediate + 4 * shape.hidden) + 2 * BF16 * shape.hidden
    if not execution.gradient_checkpointing:
        return shape.layers * layer + in_progress
    inputs = BF16 * shape.hidden * (2 if execution.offload_activations else shape.layers)
    return inputs + layer + in_progress
