"""Rows that begin alike, as a tree: ids that they share are computed once.

The rows of a group share its prompt, those of branched trajectories more than that. Sorted by their
ids, rows that begin alike are neighbours, and each row adds to the tree only what it does not share
with the row before it. The sorted rows with these shared lengths are the tree, in depth-first order.

A tree can be cut between any two rows. The later part then computes what it shares with the earlier one
again; a group is cut where it costs least, if a pack has no room for it or ranks would have to wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]

LEAST_SAVING = 0.05
"""Share of its ids that a group has to save as trees. With less, attention over plain rows, which is
faster than attention over trees, is the better choice."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows that are computed together, in depth-first order. Rows that share nothing may be in it if
    they have to stay together, so it may have several roots."""

    rows: tuple[int, ...]
    """Numbers of the rows, as its maker counts them."""
    lengths: tuple[int, ...]
    shared: tuple[int, ...]
    """How many ids each row shares with the one before it; 0 for the first."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths) - sum(self.shared)

    def cost(self, equal_length: int) -> int:
        """Time that a layer takes, in units of its own. An id costs `equal_length`, plus twice its
        position for attention to the ids before it; see `packing`."""
        squares = sum(n * n - s * s for n, s in zip(self.lengths, self.shared, strict=True))
        return squares + equal_length * self.tokens


class GroupTrees:
    """The rows of one group, which can be cut into trees of any size.

    `units` holds the ids of rows that must stay in one tree: one row, or all rows of a trajectory.
    Without `merges` nothing is shared. Rows are numbered from `first`, over all units.
    """

    def __init__(self, units: Sequence[Sequence[Ids]], first: int, *, merges: bool) -> None:
        rows = [ids for unit in units for ids in unit]
        order = _sort(rows)
        self._numbers = [first + place for place in order]
        self._lengths = [len(rows[place]) for place in order]
        self._shared = _shared_lengths([rows[place] for place in order], merges)
        self._units = _places_of_units([len(unit) for unit in units], order)
        alone = [self._tree(unit) for unit in self._units]
        self._own = [tree.tokens for tree in alone]
        self._repeated = [0] + [
            self._shared_between(before[0], unit[0]) for before, unit in pairwise(self._units)
        ]

    def cut(self, limit: int) -> list[Tree]:
        """Trees of at most `limit` tokens that repeat as few ids as possible; a larger unit is a tree
        of its own. Units that share nothing are never in one tree."""
        best: list[tuple[int, int, int]] = [
            (0, 0, 0)
        ]  # repeated ids, trees, start of the last tree
        for end in range(1, len(self._units) + 1):
            best.append(min(self._last_trees(best, end, limit)))
        trees, end = [], len(self._units)
        while end:
            start = best[end][2]
            places = sorted(place for unit in self._units[start:end] for place in unit)
            trees.append(self._tree(places))
            end = start
        return trees[::-1]

    def _last_trees(
        self, best: list[tuple[int, int, int]], end: int, limit: int
    ) -> list[tuple[int, int, int]]:
        """Every possible last tree of the units before `end`, in the form of `cut`."""
        found: list[tuple[int, int, int]] = []
        tokens = 0
        for start in range(end - 1, -1, -1):
            if found and tokens + self._own[start] > limit:
                break
            repeated, trees, _ = best[start]
            found.append((repeated + self._repeated[start], trees + 1, start))
            if not self._repeated[start]:
                break
            tokens += self._own[start] - self._repeated[start]
        return found

    def _tree(self, places: Sequence[int]) -> Tree:
        """The tree of some rows, given by their places in the sorted order."""
        between = pairwise(places)
        return Tree(
            rows=tuple(self._numbers[place] for place in places),
            lengths=tuple(self._lengths[place] for place in places),
            shared=(0, *(self._shared_between(one, other) for one, other in between)),
        )

    def _shared_between(self, one: int, other: int) -> int:
        """Rows share what all rows between them share, too."""
        return min(self._shared[one + 1 : other + 1])


def _sort(rows: Sequence[Ids]) -> list[int]:
    # As big-endian bytes, ids compare like numbers, and a whole row in one comparison.
    keys = [ids.astype(">u4").tobytes() for ids in rows]
    return sorted(range(len(rows)), key=lambda row: (keys[row], row))


def _shared_lengths(rows: Sequence[Ids], merges: bool) -> list[int]:
    """For each row, in sorted order, how many ids it shares with the one before it."""
    if not merges:
        return [0] * len(rows)
    shared = [0, *(_shared_prefix(one, other) for one, other in pairwise(rows))]
    is_worthwhile = sum(shared) >= LEAST_SAVING * sum(map(len, rows))
    return shared if is_worthwhile else [0] * len(rows)


def _shared_prefix(one: Ids, other: Ids) -> int:
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _places_of_units(sizes: Sequence[int], order: Sequence[int]) -> list[list[int]]:
    """The places of each unit's rows in the sorted order; units ordered by their first place."""
    places = np.empty(len(order), np.int64)
    places[list(order)] = np.arange(len(order))
    return sorted(sorted(unit.tolist()) for unit in np.split(places, np.cumsum(sizes)[:-1]))
