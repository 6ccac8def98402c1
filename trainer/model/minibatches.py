"""Splits a batch into minibatches, one per optimizer step, and these into packs on the device.

A sharded model gathers its weights in every forward pass, and all ranks have to take part. So every
rank gets as many packs, and as many passes per pack, as the rank that has most; a rank with fewer rows
runs padding. Rows without a trainable token are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.algorithm.aggregation import SampleCounts, token_weights
from trainer.algorithm.settings import LossSettings
from trainer.data.packing import pack
from trainer.model.pack import Pack, make_pack, padding_to, trained_values
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
class _WeightedRow:
    """A row of a batch, with its weight in the loss."""

    sample: int
    row: "Row"
    weight: float
    """Weight of each of its trainable tokens."""


@dataclass(frozen=True, slots=True)
class BatchSplitter:
    """`budget` is the largest number of tokens in a pass; 0 if every row needs a pass of its own."""

    loss: LossSettings
    ranks: Ranks
    device: Any
    budget: int

    def minibatches(self, batch: "Batch") -> list[list[TrainingPack]]:
        """The packs of each optimizer step; every sample belongs to one of the steps."""
        count, samples = self.loss.optimiser_steps, np.arange(len(batch.samples))
        if count > 1:
            samples = np.random.default_rng(batch.seed).permutation(samples)
        parts = np.array_split(samples, count)
        return [self._minibatch(batch, sorted(part.tolist())) for part in parts]

    def _minibatch(self, batch: "Batch", samples: Sequence[int]) -> list[TrainingPack]:
        items = self._items(batch, samples)
        packs = pack([[len(each.row) for each in item] for item in items], self.budget or 1)
        leveled = self._level(
            [[row for item in numbers for row in items[item]] for numbers in packs]
        )
        return [self._pack(batch, rows, self._padding(rows, passes)) for rows, passes in leveled]

    def _items(self, batch: "Batch", samples: Sequence[int]) -> list[list[_WeightedRow]]:
        """Lists of rows that have to stay in one pack."""
        weights = self._weights(batch, samples)
        items = [
            [
                _WeightedRow(sample, row, float(weight))
                for row, weight in zip(batch.samples[sample].rows, row_weights, strict=True)
                if row.trainable.any()
            ]
            for sample, row_weights in zip(samples, weights, strict=True)
        ]
        if self.loss.whole_trajectories:
            return [item for item in items if item]
        return [[row] for item in items for row in item]

    def _weights(self, batch: "Batch", sample_numbers: Sequence[int]) -> list[Any]:
        """For each sample, the weight of a token of each of its rows."""
        samples = [batch.samples[number] for number in sample_numbers]
        counts = [
            SampleCounts(sample.group, tuple(int(row.trainable.sum()) for row in sample.rows))
            for sample in samples
        ]
        return token_weights(
            self.loss.aggregation,
            counts,
            self.ranks.total,
            groups=batch.groups,
            l_const=self.loss.l_const,
        )

    def _level(self, packs: list[list[_WeightedRow]]) -> list[tuple[list[_WeightedRow], int]]:
        """Adds empty packs, so that every rank has as many, and gives the number of passes of each."""
        count = int(self.ranks.maximum(np.array([max(len(packs), 1)], np.float64))[0])
        packs = packs + [[] for _ in range(count - len(packs))]
        passes = self.ranks.maximum(np.array([max(len(rows), 1) for rows in packs], np.float64))
        return [(rows, int(most)) for rows, most in zip(packs, passes, strict=True)]

    def _padding(self, rows: Sequence[_WeightedRow], passes: int) -> tuple[int, ...]:
        if not self.budget:
            return (1,) * (passes - len(rows))
        multiple = MULTIPLE[self.device.type]
        tokens = sum(len(each.row) for each in rows)
        return padding_to(tokens, multiple) if tokens else (multiple,)

    def _pack(
        self, batch: "Batch", weighted_rows: Sequence[_WeightedRow], padding: tuple[int, ...]
    ) -> TrainingPack:
        rows = [each.row for each in weighted_rows]
        counts = [int(row.trainable.sum()) for row in rows]
        samples = np.array([each.sample for each in weighted_rows], np.int64)
        advantages = np.array([batch.advantages[sample] for sample in samples], np.float32)
        weights = np.array([each.weight for each in weighted_rows], np.float32)
        # The batch makes version V + 1 from version V, and a token sampled by V has age 0.
        ages = batch.version - 1 - trained_values(rows, "versions").astype(np.int64)
        return TrainingPack(
            pack=make_pack(rows, self.device, padding),
            behaviour=self._to_device(trained_values(rows, "behaviour")),
            advantages=self._to_device(_token_advantages(rows, advantages, counts)),
            weights=self._to_device(np.repeat(weights, counts)),
            samples=self._to_device(np.repeat(samples, counts)),
            ages=self._to_device(ages),
        )

    def _to_device(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


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
