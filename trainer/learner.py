"""Trains one batch: updates the weights of the model.

    rows -> trees -> packs -> log-probs -> loss -> gradients, summed over packs and ranks -> one step

Every rank has a Learner and the whole batch, and trains its share of the packs; all run the same number
of forward passes. The same state and the same batch give the same weights, in a single CPU
process bit for bit; `learner_state.py` names everything that this depends on.
"""

import logging
import time
from contextlib import nullcontext
from functools import partial
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
from trainer.model.adapters import AdapterWeights
from trainer.model.exported_folder import write_folder
from trainer.model.initial_weights import InitialWeights
from trainer.model.minibatches import BatchSplitter, Minibatch, TrainingPack, work_metrics
from trainer.model.mode_search import find_execution_mode
from trainer.model.offload import LayerInputs
from trainer.model.pack import Pack, make_pack
from trainer.model.packed import PackedModel
from trainer.model.packed_batch import PackedBatch, move
from trainer.model.settings import ExecutionSettings, LearnerSettings
from trainer.model.sharding import (
    Ranks,
    TrainedParameters,
    device_of_rank,
    gather,
    join,
    place_model,
)
from trainer.optimiser import OptimiserStep, make_optimiser, step_metrics, weight_decay
from trainer.out_of_memory import (
    NextStartNeeded,
    PackTooLarge,
    release_memory,
    run_pass,
    smaller_packs,
)

if TYPE_CHECKING:
    from trainer.data.batch import Batch

log = logging.getLogger(__name__)

Tensor = Any
DEFAULT_EXECUTION = ExecutionSettings()


class Learner:
    """Model, optimizer and schedule. Every rank has one, and all ranks call its methods together."""

    def __init__(
        self,
        causal: Any,
        settings: LearnerSettings,
        loss: LossSettings,
        execution: ExecutionSettings = DEFAULT_EXECUTION,
        *,
        reference: Any = None,
        device: Any = None,
        shard: bool = False,
        folder: Path | None = None,
    ) -> None:
        """`causal` is a float32 transformers model, with adapters if they are trained. `reference` is
        another one, if the loss needs it and there are no adapters. `shard` shards even a single
        rank. `folder` has the weights of models whose parameters are on the meta device."""
        self.settings, self.loss, self.execution = settings, loss, execution
        self._folder = folder
        self.ranks, self.device = Ranks(), device or device_of_rank()
        self.dtype = _dtype(settings, self.device)
        if settings.deterministic:
            torch.use_deterministic_algorithms(True)
        if execution.gradient_checkpointing:
            causal.gradient_checkpointing_enable({"use_reentrant": False})
        if execution.offload_activations:
            LayerInputs(self.device).attach(causal)
        self.model, self.trained = self._place(causal, shard)
        self._reference = self._place_reference(reference, shard)
        self.optimiser = make_optimiser(self.trained, settings, execution, self.device)
        self.steps = 0
        self.packed: PackedBatch | None = None
        """A batch that was packed ahead of its step."""

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        settings: LearnerSettings,
        loss: LossSettings,
        execution: ExecutionSettings = DEFAULT_EXECUTION,
    ) -> Self:
        """Loads a model from a Hugging Face folder; under torchrun, joins the other ranks."""
        join()
        causal = loading.build(folder)
        if settings.lora_rank:
            loading.add_lora(causal, settings.lora_rank, settings.lora_alpha, settings.lora_targets)
        needs_second_model = loss.needs_reference and not settings.lora_rank
        reference = loading.build(folder) if needs_second_model else None
        return cls(causal, settings, loss, execution, reference=reference, folder=Path(folder))

    def adopt(self, settings: LearnerSettings, loss: LossSettings) -> None:
        """Continues with the settings that a Decision records. Settings that the model is built with
        (adapters, precision, reference) do not change."""
        self.settings, self.loss = settings, loss
        for group in self.optimiser.param_groups:
            group["betas"] = (settings.beta1, settings.beta2)
            group["eps"] = settings.epsilon
            group["weight_decay"] = weight_decay(settings, group["params"])

    def step(self, batch: "Batch") -> dict[str, float]:
        """Trains the batch; returns metrics over all ranks."""
        started = time.perf_counter()
        minibatches: list[Minibatch] = []
        done: list[OptimiserStep] = []
        retries = 0
        while not minibatches or len(done) < len(minibatches):
            try:
                minibatches = minibatches or self._prepare(batch)
                done.append(self._optimise(minibatches[len(done)].packs, len(batch.samples)))
            except PackTooLarge as failed:
                self._use_smaller_packs(failed.tokens, batch.version, done)
                minibatches, retries = [], retries + 1
        metrics = step_metrics(done) | {
            "learning_rate": self.settings.rate_at(max(self.steps - 1, 0)),
            "tokens_per_pack": float(self.execution.tokens_per_pack),
            "out_of_memory": float(retries),
        }
        return metrics | work_metrics(batch, minibatches, time.perf_counter() - started)

    def _prepare(self, batch: "Batch") -> list[Minibatch]:
        """The packs of each optimizer step, with proximal log-probs where the loss needs them."""
        minibatches = self.minibatches(batch)
        if self.loss.needs_proximal:
            for each in (each for minibatch in minibatches for each in minibatch.packs):
                compute = partial(self._logprobs_without_gradient, each.pack, self.model)
                each.proximal = run_pass(len(each.pack.ids), compute)
        return minibatches

    def _use_smaller_packs(self, tokens: int, version: int, done: list[OptimiserStep]) -> None:
        """After a pass of that many tokens has failed: drops what it left, and halves the packs."""
        self._drop_gradients()
        release_memory(self.device)
        before = self.execution.tokens_per_pack
        self.execution = smaller_packs(self.execution, tokens, version)
        if self.ranks.world > 1 or (self.loss.needs_proximal and done):
            raise NextStartNeeded(tokens, self.execution.tokens_per_pack)
        log.warning(
            "out of memory in a pass of %d tokens of version %d; repeating the optimizer step, with "
            "tokens_per_pack %d instead of %d",
            tokens, version, self.execution.tokens_per_pack, before,
        )  # fmt: skip

    def pack(self, batch: "Batch", loss: LossSettings) -> PackedBatch:
        """Packs a batch ahead of its step. May be called from any thread."""
        splitter = self._splitter(loss)
        return PackedBatch(batch, splitter, splitter.minibatches(batch))

    def minibatches(self, batch: "Batch") -> list[Minibatch]:
        """The packs of each optimizer step."""
        packed, splitter = self.packed, self._splitter(self.loss)
        is_ready = packed is not None and packed.fits(batch, splitter)
        made = packed.minibatches if packed and is_ready else splitter.minibatches(batch)
        return [move(minibatch, self.device) for minibatch in made]

    def _splitter(self, loss: LossSettings) -> BatchSplitter:
        mode = self.model.mode
        return BatchSplitter(
            loss,
            self.ranks,
            torch.device("cpu"),
            0 if mode.kernel == "single" else self.execution.tokens_per_pack,
            trees=mode.trees is not None,
            equal_length=self.model.equal_length,
            runs_on=self.device.type,
        )

    def has_finite_weights(self) -> bool:
        """Whether no trained weight is NaN or infinite, on any rank; every rank has to call it."""
        weights = [weight.detach() for weight in self.trained.parameters.values()]
        return bool(gather(torch.nn.utils.get_total_norm(weights)).isfinite())

    def logprobs(self, ids: NDArray[np.int32], temperature: float = 1.0) -> NDArray[np.float32]:
        """The log-prob of each id, given those before it; 0 for the first."""
        pack = make_pack([plain_row(ids, temperature)], self.device)
        values = self._logprobs_without_gradient(pack, self.model).float().cpu().numpy()
        return np.concatenate([np.zeros(1, np.float32), values])

    def weights(self, dtype: torch.dtype = torch.bfloat16) -> loading.TrainedWeights:
        """The weights of the whole model, with adapters merged."""
        return loading.TrainedWeights(self.model.causal, self.trained, dtype, lambda: self.steps)

    def adapters(self) -> AdapterWeights | None:
        """The adapters alone, for engines that have LoRA layers; None if all weights are trained."""
        if not self.settings.lora_rank:
            return None
        return AdapterWeights(self.model.causal, self.trained)

    def export(self, model_folder: str | Path, target: Path, dtype: torch.dtype) -> None:
        """Writes a Hugging Face folder; other files than weights are copied from the model's folder."""
        source, writes = self.weights(dtype), self.ranks.rank == 0
        write_folder(source, self.model.causal, Path(model_folder), target, writes)

    def _place(self, causal: Any, shard: bool) -> tuple[PackedModel, TrainedParameters]:
        def read_weights() -> None:
            if self._folder is not None:
                InitialWeights(self._folder, causal).read()

        model = PackedModel(loading.prepare(causal), fp32_head=self.settings.fp32_head)
        trained = place_model(
            model, self.dtype, self.device, self.ranks, shard=shard, read_weights=read_weights
        )
        model.mode = find_execution_mode(model, self.dtype, self.device)
        for weight in trained.parameters.values():
            weight.grad = None  # the search has run a backward pass
        if self.execution.compile and self.device.type == "cuda":
            model.compile_layers()
        return model, trained

    def _place_reference(self, reference: Any, shard: bool) -> PackedModel | None:
        if reference is None:
            return None
        reference.requires_grad_(False)
        return self._place(reference, shard)[0]

    def _optimise(self, packs: list[TrainingPack], trajectories: int) -> OptimiserStep:
        """One optimizer step, unless the gradient is not finite: then the weights stay as they are."""
        total: PackStatistics | None = None
        for pack in packs:
            backward = partial(self._backward, pack, trajectories)
            statistics = run_pass(len(pack.pack.ids), backward)
            total = statistics if total is None else total + statistics
        assert total is not None, "there is always a pack, if only padding"
        result = OptimiserStep(total, float(self._clip()))
        if not result.is_skipped:
            for group in self.optimiser.param_groups:
                group["lr"] = self.settings.rate_at(self.steps)
            self.optimiser.step()
            self.trained.publish()
            self.steps += 1
        self._drop_gradients()
        return result

    def _backward(self, pack: TrainingPack, trajectories: int) -> PackStatistics:
        """Adds the gradient of a pack."""
        loss, statistics = objective(self.loss, self._tokens(pack, trajectories))
        loss.backward()
        return statistics

    def _drop_gradients(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)  # a failed pass may have left some on bf16 copies

    def _tokens(self, pack: TrainingPack, trajectories: int) -> Tokens:
        current, entropy = self.model(pack.pack)
        return Tokens(
            current=current,
            behaviour=pack.behaviour,
            advantages=pack.advantages,
            weights=pack.weights,
            samples=pack.samples,
            ages=pack.ages,
            entropy=entropy,
            proximal=pack.proximal,
            reference=self._reference_logprobs(pack.pack),
            trajectories=trajectories,
        )

    def _reference_logprobs(self, pack: Pack) -> Tensor | None:
        if not self.loss.needs_reference:
            return None
        with self.model.without_adapters() if self._reference is None else nullcontext():
            return self._logprobs_without_gradient(pack, self._reference or self.model)

    def _logprobs_without_gradient(self, pack: Pack, model: PackedModel) -> Tensor:
        with torch.no_grad():
            return model(pack)[0]

    def _clip(self) -> Tensor:
        weights = list(self.trained.parameters.values())
        norm = torch.nn.utils.clip_grad_norm_(weights, self.settings.grad_clip)
        return gather(norm)


def _dtype(settings: LearnerSettings, device: Any) -> Any:
    if settings.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, settings.dtype)
