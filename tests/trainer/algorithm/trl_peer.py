"""TRL's own GRPO code on log-probs that we choose: everything but its model is real.

Its trainer cannot be made without a model and a data set, so the attributes that its code reads are
set one by one. Imported by the tests that have TRL only.
"""

from collections import defaultdict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer

Tensor = Any
LONGEST = 12


@dataclass(frozen=True)
class Rollouts:
    """Two groups of four completions, right-padded: [8, LONGEST]."""

    rewards: list[float]
    lengths: list[int]
    sampling: Tensor
    proximal: Tensor
    current: Tensor
    reference: Tensor

    @property
    def mask(self) -> Tensor:
        return torch.arange(LONGEST) < torch.tensor(self.lengths).unsqueeze(1)


def rollouts(seed: int, drift: float) -> Rollouts:
    """Policies that lie a drift from one another."""
    random = np.random.default_rng(seed)

    def near(logprobs: Any) -> Any:
        return np.minimum(logprobs + random.normal(0, drift, logprobs.shape), -1e-3)

    sampling = -random.exponential(1.5, (8, LONGEST))
    proximal = near(sampling)
    current = near(proximal)
    return Rollouts(
        rewards=[1.0, 0.0, 0.0, 0.5, 2.0, 2.0, -1.0, 0.25],
        lengths=[12, 3, 7, 1, 9, 12, 5, 8],
        sampling=torch.tensor(sampling, dtype=torch.float32),
        proximal=torch.tensor(proximal, dtype=torch.float32),
        current=torch.tensor(current, dtype=torch.float32, requires_grad=True),
        reference=torch.tensor(near(current), dtype=torch.float32),
    )


class Peer(GRPOTrainer):
    """A trainer whose policies are tables of log-probs."""

    def __init__(
        self,
        played: Rollouts,
        *,
        loss_type: str,
        level: str = "token",
        epsilon: tuple[float, float] = (0.2, 0.28),
        delta: float | None = 3.0,
        beta: float = 0.0,
        off_policy_kl: bool = False,
        opsm: float | None = None,
        correction: str | None = None,
        clip: tuple[float | None, float] = (None, 2.0),
        scale_rewards: str = "group",
    ) -> None:
        self.played, self.loss_type, self.importance_sampling_level = played, loss_type, level
        self.epsilon_low, self.epsilon_high = epsilon
        self.beta, self.off_policy_mask_threshold = beta, opsm
        self.scale_rewards, self.num_generations = scale_rewards, 4
        self.max_completion_length = LONGEST
        self.use_vllm = self.vllm_importance_sampling_correction = correction is not None
        self.vllm_importance_sampling_mode = correction
        self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max = clip
        self.args = SimpleNamespace(
            delta=delta,
            use_bias_correction_kl=off_policy_kl,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
            per_device_train_batch_size=8,
        )
        self.num_iterations, self.current_gradient_accumulation_steps = 2, 1
        self.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
        self.ref_model = object()
        self.accelerator = SimpleNamespace(
            device="cpu",
            num_processes=1,
            process_index=0,
            gather=lambda values: values,
            reduce=lambda values, reduction: values,
        )
        self._tokenizer = SimpleNamespace(pad_token_id=0)
        self.reward_weights, self.reward_func_names = torch.ones(1), ["reward"]
        self.multi_objective_aggregation = "sum_then_normalize"
        self.top_entropy_quantile = 1.0
        self.environment_factories = self.environments = self.pad_to_multiple_of = None
        self.tools = self.mask_truncated_completions = self.aux_loss_enabled = False
        self._entropy_bonus_enabled = self.log_multimodal = False
        self._metrics: Any = {"train": defaultdict(list)}
        self._logs: Any = defaultdict(deque, rewards=defaultdict(deque))
        self._pending_extra_logs: dict[str, Any] = {}
        self._pending_metrics: dict[str, Any] = {}

    def loss(self) -> tuple[Tensor, list[float]]:
        """The loss of one step, and the advantages that went into it."""
        inputs = self._generate_and_score_completions([{"prompt": ""} for _ in range(8)])
        return self._compute_loss(self.model, inputs), inputs["advantages"].tolist()

    def _generate(self, _: list[Any]) -> tuple[Any, ...]:
        sampled = [
            row[:length].tolist()
            for row, length in zip(self.played.sampling, self.played.lengths, strict=True)
        ]
        ids = [[1] * length for length in self.played.lengths]
        return [[1]] * 8, ids, None, [""] * 8, sampled if self.use_vllm else None, {}, None, []

    def _calculate_rewards(self, *_: Any) -> Tensor:
        return torch.tensor(self.played.rewards).unsqueeze(1)

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        """Without a gradient TRL asks for the policy before the step."""
        if model is self.ref_model:
            chosen = self.played.reference
        elif torch.is_grad_enabled():
            chosen = self.played.current
        else:
            chosen = self.played.proximal if self.use_vllm else self.played.sampling
        return chosen, torch.zeros_like(chosen), None
