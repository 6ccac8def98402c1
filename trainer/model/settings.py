"""Settings of the optimizer and of running the model. Imports no torch.

`LearnerSettings` decide what is computed: a Decision records them, and whoever trains it uses the
recorded ones. `ExecutionSettings` decide how it is computed on a machine: each process uses its own,
and the Outcome records them.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ExecutionSettings(BaseModel):
    """How the model is run: memory and speed. Results differ by rounding only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens_per_pack: int = Field(
        32768,
        ge=1,
        description="most tokens in one forward pass, those that rows of a group share counted once; a "
        "longer row gets a pass of its own",
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute layers in the backward pass: less memory, but a third slower"
    )
    offload_activations: bool = Field(
        False,
        description="keep the inputs of recomputed layers in CPU memory until the backward pass, for "
        "very long rows; needs gradient_checkpointing",
    )
    offload_optimiser: bool = Field(
        False,
        description="keep AdamW's averages, 8 bytes per trained weight, in CPU memory between "
        "optimizer steps",
    )
    compile: bool = Field(
        True, description="on GPUs, compile the layers: nearly twice as fast after the first step"
    )

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError("offload_activations needs gradient_checkpointing")
        return self


class LearnerSettings(BaseModel):
    """How weights are updated; the function that is minimized is in LossSettings."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    learning_rate: float = Field(1e-6, ge=0, description="learning rate of AdamW after the warm-up")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of AdamW's average of gradients")
    beta2: float = Field(
        0.99, ge=0, lt=1, description="decay of AdamW's average of squared gradients"
    )
    epsilon: float = Field(1e-8, gt=0, description="added to AdamW's denominator")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of AdamW, on matrices only")
    grad_clip: float = Field(
        1.0, gt=0, description="largest norm of the gradient; above it, gradients are scaled down"
    )
    warmup: int = Field(0, ge=0, description="optimizer steps until the full learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="learning rate after the warm-up; linear and cosine fall to 0 at total_steps",
    )
    total_steps: int | None = Field(
        None, ge=1, description="optimizer steps of the run, for the linear and cosine schedules"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="data type to compute in; auto is bfloat16 on GPUs and float32 on CPUs"
    )
    fp32_head: bool = Field(
        False,
        description="multiply with the output head in float32, at a third of the speed; logits and "
        "log-softmax are float32 in any case",
    )
    lora_rank: int = Field(
        0, ge=0, description="train LoRA adapters of this rank; 0 trains all weights"
    )
    lora_alpha: float = Field(32.0, gt=0, description="scale of LoRA adapters: alpha / rank")
    lora_targets: tuple[str, ...] | str = Field(
        "all-linear", description="names of the modules that get adapters, or all-linear"
    )
    deterministic: bool = Field(
        False, description="use only deterministic algorithms on GPUs; on CPUs all are"
    )

    @classmethod
    def from_record(cls, fields: Mapping[str, Any]) -> Self:
        """Settings from a Decision or checkpoint of any release; earlier ones recorded the execution
        settings among them."""
        names = fields.keys() - ExecutionSettings.model_fields.keys()
        return cls.model_validate({name: fields[name] for name in names})

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule {self.schedule} needs total_steps")
        return self

    def rate_at(self, step: int) -> float:
        """The learning rate of an optimizer step; steps count from 0."""
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.schedule == "constant" or self.total_steps is None:
            return self.learning_rate * warm
        done = (step - self.warmup) / max(self.total_steps - self.warmup, 1)
        done = min(max(done, 0.0), 1.0)
        factor = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * warm * factor
