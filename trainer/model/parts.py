"""A batch in parts: packs on the device, with what the loss needs of their trainable tokens.

Every rank gets as many parts as the one with most, and as many passes in each: a sharded model
gathers its weights in every pass, and all ranks have to take part. Filling makes up for what a rank
has less. Rows without a trainable token are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.algorithm.aggregation import SampleCounts, token_weights
from trainer.algorithm.settings import LossSettings
from trainer.data.packing import pack
from trainer.model.pack import Pack, filling_to, pack_of, trained_values
from trainer.model.sharding import Ranks

if TYPE_CHECKING:
    from pool.core.rows import Row
    from trainer.data.batch import Batch

Tensor = Any
MULTIPLE = {"cuda": 128, "cpu": 1}
"""Packs are filled up to a multiple of it, which the matrix kernels of GPUs like."""


@dataclass(slots=True)
class Part:
    """One pass forwards and backwards; the tensors are flat over its trainable tokens."""

    pack: Pack
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    samples: Tensor
    ages: Tensor
    proximal: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """A row of a batch."""

    sample: int
    row: "Row"
    weight: float
    """Of each of its trainable tokens."""


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts batches. `budget`: most tokens of a pass; 0 where every row needs one of its own."""

    loss: LossSettings
    ranks: Ranks
    device: Any
    budget: int

    def minibatches(self, batch: "Batch") -> list[list[Part]]:
        """The parts of each optimiser step; every sample is in one of them."""
        count, samples = self.loss.optimiser_steps, np.arange(len(batch.samples))
        if count > 1:
            samples = np.random.default_rng(batch.seed).permutation(samples)
        chosen = np.array_split(samples, count)
        return [self._parts(batch, sorted(part.tolist())) for part in chosen]

    def _parts(self, batch: "Batch", chosen: Sequence[int]) -> list[Part]:
        items = self._items(batch, chosen)
        packs = pack([[len(place.row) for place in item] for item in items], self.budget or 1)
        filled = self._level([[place for item in one for place in items[item]] for one in packs])
        return [
            self._part(batch, places, self._filling(places, passes)) for places, passes in filled
        ]

    def _items(self, batch: "Batch", chosen: Sequence[int]) -> list[list[_Place]]:
        """Rows that have to stay together."""
        weights = self._weights(batch, chosen)
        items = [
            [
                _Place(sample, row, float(weight))
                for row, weight in zip(batch.samples[sample].rows, each, strict=True)
                if row.trainable.any()
            ]
            for sample, each in zip(chosen, weights, strict=True)
        ]
        if self.loss.whole_trajectories:
            return [item for item in items if item]
        return [[place] for item in items for place in item]

    def _weights(self, batch: "Batch", chosen: Sequence[int]) -> list[Any]:
        """For each sample, the weight of a token of each of its rows."""
        samples = [batch.samples[place] for place in chosen]
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

    def _level(self, packs: list[list[_Place]]) -> list[tuple[list[_Place], int]]:
        """Packs of rows, as many on every rank, and the passes of each."""
        count = int(self.ranks.most(np.array([max(len(packs), 1)], np.float64))[0])
        packs = packs + [[] for _ in range(count - len(packs))]
        passes = self.ranks.most(np.array([max(len(one), 1) for one in packs], np.float64))
        return [(one, int(most)) for one, most in zip(packs, passes, strict=True)]

    def _filling(self, places: Sequence[_Place], passes: int) -> tuple[int, ...]:
        if not self.budget:
            return (1,) * (passes - len(places))
        multiple = MULTIPLE[self.device.type]
        tokens = sum(len(place.row) for place in places)
        return filling_to(tokens, multiple) if tokens else (multiple,)

    def _part(self, batch: "Batch", places: Sequence[_Place], filling: tuple[int, ...]) -> Part:
        rows = [place.row for place in places]
        counts = [int(row.trainable.sum()) for row in rows]
        samples = np.array([place.sample for place in places], np.int64)
        worth = np.array([batch.advantages[sample] for sample in samples], np.float32)
        weights = np.array([place.weight for place in places], np.float32)
        # The batch makes version V + 1 from version V, and a token of V has age 0.
        ages = batch.version - 1 - trained_values(rows, "versions").astype(np.int64)
        return Part(
            pack=pack_of(rows, self.device, filling),
            behaviour=self._on(trained_values(rows, "behaviour")),
            advantages=self._on(_worth(rows, worth, counts)),
            weights=self._on(np.repeat(weights, counts)),
            samples=self._on(np.repeat(samples, counts)),
            ages=self._on(ages),
        )

    def _on(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _worth(rows: "Sequence[Row]", of_samples: Any, counts: Sequence[int]) -> Any:
    """The advantage of every trainable token: its trajectory's, unless it has one of its own."""
    worth = np.repeat(of_samples, counts)
    ends = np.cumsum(counts)
    for row, end, count in zip(rows, ends, counts, strict=True):
        if row.advantages is not None:
            worth[end - count : end] = row.advantages[row.trainable]
    return worth
