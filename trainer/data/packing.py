"""Distributes trees into packs, forward passes with a limited number of tokens, and packs to ranks.

A sharded model gathers its weights in every pass, so all ranks run the same number of passes, and each
pass takes as long as the slowest rank. A *round* is what all ranks run at the same time: one pack for
each. Rounds are filled one after another, the costliest trees first. The largest tree that is left sets
the cost up to which all ranks can work in a round without making it longer.

Every rank computes the whole plan from the same rows, and gets the same one.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trainer.data.trees import GroupTrees, Tree

Packs = list[list[Tree]]

SLACK = 1.02
"""By how much a rank may exceed the mean cost of a round, so that trees of any size find a place."""
PARTS = (1, 2, 4, 8)
"""Groups are cut into trees of at most these fractions of a pack. Smaller trees repeat more ids, but
spread better over ranks."""


class Plan(NamedTuple):
    rounds: list[Packs]
    """For each round, the trees of every rank; a rank may have none."""
    equal_length: int
    """Row length at which attention, whose cost grows with the square of it, costs as much as the rest
    of a layer."""

    def costs(self) -> list[list[int]]:
        """For each round, the cost of every rank's pack."""
        return [
            [sum(tree.cost(self.equal_length) for tree in pack) for pack in round]
            for round in self.rounds
        ]

    @property
    def tokens(self) -> int:
        return sum(tree.tokens for round in self.rounds for pack in round for tree in pack)

    @property
    def packs(self) -> int:
        return sum(bool(pack) for round in self.rounds for pack in round)

    @property
    def duration(self) -> int:
        """Cost of all rounds, each as long as its costliest pack."""
        return sum(map(max, self.costs()))

    @property
    def useful_share(self) -> float:
        """Share of all ranks' time in which they do not wait for another."""
        costs = self.costs()
        available = sum(len(round) * max(round) for round in costs)
        return sum(map(sum, costs)) / max(available, 1)


def plan_packs(groups: Sequence[GroupTrees], budget: int, ranks: int, equal_length: int) -> Plan:
    """The plan with the shortest duration, over trees of several sizes. `budget` is the largest number
    of tokens in a pack; a tree above it gets a pack of its own. With 0, every tree does."""
    plans: dict[tuple[Tree, ...], Plan] = {}
    for part in PARTS if ranks > 1 else PARTS[:1]:
        trees = tuple(tree for group in groups for tree in group.cut(max(budget // part, 1)))
        if trees not in plans:
            plans[trees] = pack_trees(trees, budget, ranks, equal_length)
    return min(plans.values(), key=lambda plan: plan.duration)


def pack_trees(trees: Sequence[Tree], budget: int, ranks: int, equal_length: int) -> Plan:
    """Packs of the given trees, in rounds that begin with the costliest."""
    room = [tree.tokens if budget else 1 for tree in trees]
    costs = [tree.cost(equal_length) for tree in trees]
    left = sorted(range(len(trees)), key=lambda tree: (-costs[tree], tree))
    rounds: list[Packs] = []
    while left:
        packs, left = _fill_round(left, room, costs, budget or 1, ranks)
        rounds.append([[trees[number] for number in sorted(pack)] for pack in packs])
    durations = [max(round) for round in Plan(rounds, equal_length).costs()]
    order = sorted(range(len(rounds)), key=lambda n: (-durations[n], n))
    return Plan([rounds[n] for n in order], equal_length)


def _fill_round(
    left: list[int], tokens: Sequence[int], costs: Sequence[int], budget: int, ranks: int
) -> tuple[list[list[int]], list[int]]:
    """One pack for each rank, and the trees that are left for later rounds."""
    largest = left[0]
    rounds = math.ceil(sum(min(tokens[tree], budget) for tree in left) / (budget * ranks))
    mean = sum(costs[tree] for tree in left) / (ranks * rounds)
    ceiling = max(costs[largest], SLACK * mean)
    # If one rank has memory for a tree above the budget, the others have memory for as much.
    room = np.full(ranks, max(budget, tokens[largest]), np.int64)
    load = np.zeros(ranks, np.int64)
    most_room, least_load = int(room[0]), 0
    packs: list[list[int]] = [[] for _ in range(ranks)]
    later = []
    for tree in left:
        if tokens[tree] > most_room or least_load + costs[tree] > ceiling:
            later.append(tree)
            continue
        fitting = np.flatnonzero((room >= tokens[tree]) & (load + costs[tree] <= ceiling))
        if len(fitting) == 0:
            later.append(tree)
            continue
        rank = fitting[np.argmin(load[fitting])]
        packs[rank].append(tree)
        room[rank] -= tokens[tree]
        load[rank] += costs[tree]
        most_room, least_load = int(room.max()), int(load.min())
    return packs, later
