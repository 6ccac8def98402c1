"""One batch to new weights.

    rows -> packs -> log-probs -> loss -> gradients, summed over packs and ranks -> one optimiser step

Every rank has a Learner and its own samples, and all do the same number of forward passes: a rank
with fewer packs runs filling. The same state and the same batch give the same weights, on one CPU
process bit for bit; `state` has all that this depends on.
"""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from pool.core.rows import plain_row
from trainer.algorithm.objective import Tokens, objective
from trainer.algorithm.settings import LossSettings
from trainer.algorithm.statistics import PackStatistics
from trainer.model import loading
from trainer.model.pack import Pack, pack_of
from trainer.model.packed import PackedModel
from trainer.model.parts import Cutter, Part
from trainer.model.probing import find_way
from trainer.model.settings import LearnerSettings
from trainer.model.sharding import Held, Ranks, device_of_rank, hold, join, whole

if TYPE_CHECKING:
    from trainer.data.batch import Batch

Tensor = Any


class Learner:
    """Model, optimiser and schedule. Every rank has one, and calls every method when others do."""

    def __init__(
        self,
        causal: Any,
        settings: LearnerSettings,
        loss: LossSettings,
        *,
        reference: Any = None,
        device: Any = None,
        shard: bool = False,
    ) -> None:
        """`causal`: a float32 model of transformers, with adapters where they are wanted. `reference`:
        another, if the loss needs one and there are no adapters. `shard`: also on one rank."""
        self.settings, self.loss = settings, loss
        self.ranks, self.device = Ranks(), device or device_of_rank()
        self.dtype = _dtype(settings, self.device)
        if settings.deterministic:
            torch.use_deterministic_algorithms(True)
        if settings.gradient_checkpointing:
            causal.gradient_checkpointing_enable({"use_reentrant": False})
        self.model, self.held = self._placed(causal, shard)
        self._reference = self._frozen(reference, shard)
        self.optimiser = _optimiser(self.held, settings, self.device)
        self.steps = 0

    @classmethod
    def from_folder(cls, folder: str | Path, settings: LearnerSettings, loss: LossSettings) -> Self:
        """Of a Hugging Face folder; joins the other ranks under torchrun."""
        join()
        causal = loading.load(folder)
        if settings.lora_rank:
            loading.add_lora(causal, settings.lora_rank, settings.lora_alpha, settings.lora_targets)
        wants_other = loss.needs_reference and not settings.lora_rank
        reference = loading.load(folder) if wants_other else None
        return cls(causal, settings, loss, reference=reference)

    def adopt(self, settings: LearnerSettings, loss: LossSettings) -> None:
        """Trains on by other settings, such as those that an earlier Decision was made with. What a
        model is built with (adapters, precision, a reference) stays as it is."""
        self.settings, self.loss = settings, loss
        for group in self.optimiser.param_groups:
            group["betas"] = (settings.beta1, settings.beta2)
            group["eps"] = settings.epsilon
            group["weight_decay"] = _decay(settings, group["params"])

    def step(self, batch: "Batch") -> dict[str, float]:
        """Trains the batch; what it gives back is of all ranks together."""
        began = time.perf_counter()
        parts = self.minibatches(batch)
        if self.loss.needs_proximal:
            for part in (part for minibatch in parts for part in minibatch):
                part.proximal = self._frozen_logprobs(part.pack, self.model)
        statistics, norms = None, []
        for minibatch in parts:
            found, norm = self._optimise(minibatch, len(batch.samples))
            statistics = found if statistics is None else statistics + found
            norms.append(norm)
        assert statistics is not None
        metrics = statistics.over_ranks().metrics()
        metrics["grad_norm"] = max(float(norm) for norm in norms)
        packs = sum(map(len, parts))
        return metrics | self._measured(batch, packs, time.perf_counter() - began)

    def minibatches(self, batch: "Batch") -> list[list[Part]]:
        """The batch as it is run: packs, for each optimiser step."""
        single = self.model.way.kernel == "single"
        budget = 0 if single else self.settings.tokens_per_pack
        return Cutter(self.loss, self.ranks, self.device, budget).minibatches(batch)

    def logprobs(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Of each id, given those before it, at temperature 1; 0 for the first."""
        packed = pack_of([plain_row(ids)], self.device)
        found = self._frozen_logprobs(packed, self.model).float().cpu().numpy()
        return np.concatenate([np.zeros(1, np.float32), found])

    def weights(self, dtype: torch.dtype = torch.bfloat16) -> loading.TrainedWeights:
        """What engines get: all weights, adapters merged."""
        return loading.TrainedWeights(self.model.causal, self.held, dtype)

    def export(self, model_folder: str | Path, target: Path, dtype: torch.dtype) -> None:
        """Writes a Hugging Face folder; what is not weights comes from the model's own."""
        source, writes = self.weights(dtype), self.ranks.rank == 0
        loading.export(source, self.model.causal, model_folder, target, writes)

    def state(self) -> dict[str, Tensor]:
        """Tensors on the CPU, whole, so that any number of ranks can go on; rank 0 gets them."""
        random = {"random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["random.cuda"] = torch.cuda.get_rng_state(self.device)
        kept = {"steps": torch.tensor(self.steps), **random}
        for name, weight in self.held.parameters.items():
            kept[f"weight.{name}"] = self._saved(weight)
            for field, value in self.optimiser.state[weight].items():
                kept[f"optimiser.{field}.{name}"] = self._saved(value)
        return kept if self.ranks.rank == 0 else {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Every rank brings the whole state."""
        self.steps = int(state["steps"])
        torch.set_rng_state(state["random.cpu"])
        if self.device.type == "cuda" and "random.cuda" in state:
            torch.cuda.set_rng_state(state["random.cuda"], self.device)
        for name, weight in self.held.parameters.items():
            _restore(weight, state[f"weight.{name}"])
            self.optimiser.state[weight].clear()
            for field in ("step", "exp_avg", "exp_avg_sq"):
                if f"optimiser.{field}.{name}" in state:
                    saved = state[f"optimiser.{field}.{name}"]
                    self.optimiser.state[weight][field] = _like(saved, weight, field, self.device)
        self.held.publish()

    def _placed(self, causal: Any, shard: bool) -> tuple[PackedModel, Held]:
        model = PackedModel(loading.prepared(causal), fp32_head=self.settings.fp32_head)
        held = hold(model, self.dtype, self.device, self.ranks, shard=shard)
        model.way = find_way(model, self.dtype, self.device)
        if self.settings.compile and self.device.type == "cuda":
            model.compile_layers()
        return model, held

    def _frozen(self, reference: Any, shard: bool) -> PackedModel | None:
        if reference is None:
            return None
        reference.requires_grad_(False)
        return self._placed(reference, shard)[0]

    def _optimise(self, parts: list[Part], trajectories: int) -> tuple[PackStatistics, Tensor]:
        total: PackStatistics | None = None
        for part in parts:
            loss, found = objective(self.loss, self._tokens(part, trajectories))
            loss.backward()
            total = found if total is None else total + found
        assert total is not None, "there is always a part, if only filling"
        norm = self._clip()
        for group in self.optimiser.param_groups:
            group["lr"] = self.settings.rate_at(self.steps)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.held.publish()
        self.steps += 1
        return total, norm

    def _tokens(self, part: Part, trajectories: int) -> Tokens:
        current, entropy = self.model(part.pack)
        return Tokens(
            current=current,
            behaviour=part.behaviour,
            advantages=part.advantages,
            weights=part.weights,
            samples=part.samples,
            ages=part.ages,
            entropy=entropy,
            proximal=part.proximal,
            reference=self._reference_logprobs(part.pack),
            trajectories=trajectories,
        )

    def _reference_logprobs(self, packed: Pack) -> Tensor | None:
        if not self.loss.needs_reference:
            return None
        with self.model.without_adapters() if self._reference is None else nullcontext():
            return self._frozen_logprobs(packed, self._reference or self.model)

    def _frozen_logprobs(self, packed: Pack, model: PackedModel) -> Tensor:
        with torch.no_grad():
            return model(packed)[0]

    def _clip(self) -> Tensor:
        weights = list(self.held.parameters.values())
        norm = torch.nn.utils.clip_grad_norm_(weights, self.settings.grad_clip)
        return whole(norm)

    def _measured(self, batch: "Batch", packs: int, seconds: float) -> dict[str, float]:
        rows = [row for sample in batch.samples for row in sample.rows]
        own = np.array([sum(map(len, rows)), len(rows), packs], np.float64)
        tokens, count, packs_in_all = self.ranks.total(own)
        return {
            "learning_rate": self.settings.rate_at(self.steps - 1),
            "row_tokens": float(tokens),
            "rows": float(count),
            "packs": float(packs_in_all),
            "tokens_per_second": float(tokens) / seconds,
        }

    def _saved(self, value: Tensor) -> Tensor:
        found = whole(value)
        return found.to("cpu", copy=True) if self.ranks.rank == 0 else found


def _dtype(settings: LearnerSettings, device: Any) -> Any:
    if settings.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, settings.dtype)


def _optimiser(held: Held, settings: LearnerSettings, device: Any) -> Any:
    weights = list(held.parameters.values())
    kinds = [w for w in weights if w.ndim > 1], [w for w in weights if w.ndim <= 1]
    groups = [{"params": kind, "weight_decay": _decay(settings, kind)} for kind in kinds if kind]
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=device.type == "cuda",
    )


def _decay(settings: LearnerSettings, weights: list[Tensor]) -> float:
    """Norms and biases are not drawn to 0."""
    return settings.weight_decay if weights[0].ndim > 1 else 0.0


def _restore(weight: Tensor, saved: Tensor) -> None:
    with torch.no_grad():
        weight.copy_(_like(saved, weight, "weight", weight.device))


def _like(saved: Tensor, weight: Tensor, field: str, device: Any) -> Tensor:
    """In shards where the weight is. AdamW counts its steps on the CPU, unless it is fused."""
    if field == "step":
        return saved.to(device)
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None:
        return saved.to(device, copy=True)
    return torch.distributed.tensor.distribute_tensor(saved.to(device), mesh, weight.placements)
