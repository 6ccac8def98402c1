"""Splits a batch into minibatches, one per optimizer step, and these into packs on the device.

Every rank has the whole batch, computes the same plan of packs for all ranks, and makes the tensors of
its own. A sharded model gathers its weights in every forward pass, and all ranks have to take part: a
rank that has nothing to do in a round runs padding. Rows without a trainable token are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.algorithm.aggregation import SampleCounts, token_weights
from trainer.algorithm.settings import LossSettings
from trainer.data.packing import Plan, plan_packs
from trainer.data.trees import GroupTrees, Tree
from trainer.model.pack import Pack, make_pack, padding_to, to_device, trained_values
from trainer.model.sharding import Ranks

if TYPE_CHECKING:
    from pool.core.rows import Row
    from trainer.data.batch import Batch

Tensor = Any
MULTIPLE = {"cuda": 128, "cpu": 1}
"""Packs are padded to a multiple of this length, at which the matrix kernels of GPUs are faster."""


@dataclass(slots=True)
class TrainingPack:
    """One forward and backward pass; the tensors are flat over its trainable tokens."""

    pack: Pack
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    samples: Tensor
    ages: Tensor
    proximal: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimizer step trains."""

    packs: list[TrainingPack]
    """Of this rank."""
    plan: Plan
    """Of all ranks."""


@dataclass(frozen=True, slots=True)
class _WeightedRow:
    """A row of a batch, with its weight in the loss."""

    sample: int
    row: "Row"
    weight: float
    """Weight of each of its trainable tokens."""


@dataclass(frozen=True, slots=True)
class BatchSplitter:
    """`budget` is the largest number of tokens in a pass; 0 if every row needs a pass of its own. With
    `trees`, ids that rows of a group share are computed once."""

    loss: LossSettings
    ranks: Ranks
    device: Any
    budget: int
    trees: bool = False
    equal_length: int = 8192
    """See `packing.Plan`."""
    runs_on: str = "cpu"
    """Type of the device that the packs will run on, for which they are padded."""

    def minibatches(self, batch: "Batch") -> list[Minibatch]:
        """The packs of each optimizer step; every sample belongs to one of the steps."""
        count, samples = self.loss.optimiser_steps, np.arange(len(batch.samples))
        if count > 1:
            samples = np.random.default_rng(batch.seed).permutation(samples)
        parts = np.array_split(samples, count)
        return [self._minibatch(batch, sorted(part.tolist())) for part in parts]

    def _minibatch(self, batch: "Batch", samples: Sequence[int]) -> Minibatch:
        rows = self._rows(batch, samples)
        groups = self._groups(batch, rows)
        plan = plan_packs(groups, self.budget, self.ranks.world, self.equal_length)
        own = [(round[self.ranks.rank], _passes(round)) for round in plan.rounds]
        # There is always a pack, if only padding, so that there is always a gradient.
        packs = [self._pack(batch, rows, *each) for each in own or [([], 1)]]
        return Minibatch(packs, plan)

    def _rows(self, batch: "Batch", samples: Sequence[int]) -> list[_WeightedRow]:
        """The rows with trainable tokens, those of a sample one after another."""
        weights = self._weights(batch, samples)
        return [
            _WeightedRow(sample, row, float(weight))
            for sample, row_weights in zip(samples, weights, strict=True)
            for row, weight in zip(batch.samples[sample].rows, row_weights, strict=True)
            if row.trainable.any()
        ]

    def _groups(self, batch: "Batch", rows: Sequence[_WeightedRow]) -> list[GroupTrees]:
        """The rows of each group; rows that have to stay in one pack are one unit."""
        whole = self.loss.whole_trajectories
        groups: list[GroupTrees] = []
        by_group = groupby(enumerate(rows), lambda each: batch.samples[each[1].sample].group)
        for _, numbered in by_group:
            members = list(numbered)
            units = groupby(members, lambda each: each[1].sample if whole else each[0])
            ids = [[each.row.ids for _, each in unit] for _, unit in units]
            groups.append(GroupTrees(ids, members[0][0], merges=self.trees))
        return groups

    def _weights(self, batch: "Batch", sample_numbers: Sequence[int]) -> list[Any]:
        """For each sample, the weight of a token of each of its rows."""
        samples = [batch.samples[number] for number in sample_numbers]
        counts = [
            SampleCounts(sample.group, tuple(int(row.trainable.sum()) for row in sample.rows))
            for sample in samples
        ]
        return token_weights(self.loss.aggregation, counts, l_const=self.loss.l_const)

    def _padding(self, trees: Sequence[Tree], passes: int) -> tuple[int, ...]:
        if not self.budget:
            return (1,) * (passes - sum(len(tree.rows) for tree in trees))
        multiple = MULTIPLE[self.runs_on]
        tokens = sum(tree.tokens for tree in trees)
        return padding_to(tokens, multiple) if tokens else (multiple,)

    def _pack(
        self, batch: "Batch", all_rows: Sequence[_WeightedRow], trees: Sequence[Tree], passes: int
    ) -> TrainingPack:
        weighted_rows = [all_rows[number] for tree in trees for number in tree.rows]
        rows = [each.row for each in weighted_rows]
        shared = [common for tree in trees for common in tree.shared]
        counts = [int(row.trainable.sum()) for row in rows]
        samples = np.array([each.sample for each in weighted_rows], np.int64)
        advantages = np.array([batch.advantages[sample] for sample in samples], np.float32)
        weights = np.array([each.weight for each in weighted_rows], np.float32)
        # The batch makes version V + 1 from version V, and a token sampled by V has age 0.
        ages = batch.version - 1 - trained_values(rows, "versions").astype(np.int64)
        return TrainingPack(
            pack=make_pack(rows, self.device, self._padding(trees, passes), shared),
            behaviour=to_device(trained_values(rows, "behaviour"), self.device),
            advantages=to_device(_token_advantages(rows, advantages, counts), self.device),
            weights=to_device(np.repeat(weights, counts), self.device),
            samples=to_device(np.repeat(samples, counts), self.device),
            ages=to_device(ages, self.device),
        )


def work_metrics(
    batch: "Batch", minibatches: Sequence[Minibatch], seconds: float
) -> dict[str, float]:
    """How much all ranks computed in a step, and how evenly."""
    rows = [row for sample in batch.samples for row in sample.rows]
    plans = [minibatch.plan for minibatch in minibatches]
    tokens = float(sum(map(len, rows)))
    duration = sum(plan.duration for plan in plans)
    return {
        "row_tokens": tokens,
        "tree_tokens": float(sum(plan.tokens for plan in plans)),
        "rows": float(len(rows)),
        "packs": float(sum(plan.packs for plan in plans)),
        "balance": sum(plan.useful_share * plan.duration for plan in plans) / max(duration, 1),
        "tokens_per_second": tokens / seconds,
    }


def _passes(round: list[list[Tree]]) -> int:
    """Forward passes of a round in which every row has its own, the same number on every rank."""
    return max(1, *(sum(len(tree.rows) for tree in pack) for pack in round))


def _token_advantages(rows: "Sequence[Row]", by_row: Any, counts: Sequence[int]) -> Any:
    """The advantage of every trainable token: its trajectory's, unless the token has its own."""
    advantages = np.repeat(by_row, counts)
    ends = np.cumsum(counts)
    for row, end, count in zip(rows, ends, counts, strict=True):
        if row.advantages is not None:
            own = row.advantages[row.trainable]
            tokens = slice(end - count, end)
            advantages[tokens] = np.where(np.isnan(own), advantages[tokens], own)
    return advantages
