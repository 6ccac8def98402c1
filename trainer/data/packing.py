"""Distributes rows into packs: forward passes with a limited number of tokens.

An item is what must stay together: one row, or all rows of a trajectory. Equal lengths give equal packs
everywhere. An item above the budget gets a pack of its own. Packs are sorted by cost, the most
expensive first, because the n-th packs of all ranks run at the same time and should cost about the
same.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

EQUAL_LENGTH = 8192
"""Row length at which attention, whose cost grows with the square of it, costs as much as the rest of a
layer: about 12 times the hidden size, so 10,000 for a model of 0.5B parameters. Only the balance of
packs depends on it."""


def pack(items: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Packs, as lists of item numbers. `items` holds the lengths of each item's rows."""
    tokens = np.array([sum(lengths) for lengths in items], np.int64)
    costs = np.array([_cost(lengths) for lengths in items], np.int64)
    order = np.lexsort((np.arange(len(items)), -costs))
    fewest = math.ceil(int(np.minimum(tokens, budget).sum()) / budget)
    attempts = (_distribute(order, tokens, costs, budget, n) for n in itertools.count(fewest))
    packs = next(packs for packs in attempts if packs is not None)
    packs.sort(key=lambda pack: (-costs[pack].sum(), pack))
    return packs


def _distribute(
    order: Ints, tokens: Ints, costs: Ints, budget: int, n: int
) -> list[list[int]] | None:
    """Puts each item, in order, into the cheapest of `n` packs that has room; None if an item fits
    nowhere."""
    packs: list[list[int]] = [[] for _ in range(n)]
    room, load = np.full(n, budget, np.int64), np.zeros(n, np.int64)
    for item in order:
        fitting = np.flatnonzero((room >= tokens[item]) | (load == 0))
        if len(fitting) == 0:
            return None
        cheapest = fitting[np.argmin(load[fitting])]
        packs[cheapest].append(int(item))
        room[cheapest] -= tokens[item]
        load[cheapest] += costs[item]
    return [sorted(pack) for pack in packs if pack]


def _cost(lengths: Sequence[int]) -> int:
    return sum(length * (length + EQUAL_LENGTH) for length in lengths)
