"""How much of the ranks' time is useful, with rows of log-normal length.

A forward pass takes as long as the slowest rank's. The plans are those of the trainer, and the costs
its estimates: tokens, plus attention. For comparison, whole groups are dealt to ranks in turn, and
every rank packs its own.
"""

import itertools
from typing import NamedTuple

import numpy as np

from trainer.data.packing import Plan, pack_trees
from trainer.data.trees import Tree

BUDGET = 32768
"""Tokens of a pack, as by default."""
EQUAL_LENGTH = 8192
"""Of a model with 0.5B parameters. Larger models have larger ones, with which balance is easier."""
SPREAD = 0.7
"""Standard deviation of the logarithm of lengths."""
CONTEXT = 65_536
DRAWS = 8


class Case(NamedTuple):
    groups: int
    size: int
    ranks: int
    mean: int
    target: float
    longest: float = CONTEXT
    """Context length: no row is longer."""


CASES = (
    Case(32, 8, 8, 2_000, 0.95),
    Case(32, 8, 8, 8_000, 0.80),
    Case(64, 16, 64, 12_000, 0.65),
)
UNLIMITED = CASES[-1]._replace(longest=np.inf)
"""Here the longest row alone takes longer than a rank's fair share of the batch, so that no plan is
good."""


def run() -> None:
    print(f"\nuseful share of the ranks' time, packs of {BUDGET:,} tokens, log-normal lengths")
    titles = f"{'groups':>10}{'ranks':>8}{'mean':>10}{'longest':>10}"
    print(f"{titles}{'groups in turn':>18}{'planned':>10}{'target':>10}")
    for case in CASES:
        _print(case, f"{case.target:.0%}")
    _print(UNLIMITED, "-")


def _print(case: Case, target: str) -> None:
    dealt, planned = useful_shares(case)
    longest = "none" if np.isinf(case.longest) else f"{case.longest:,}"
    sizes = f"{case.groups:>5} x {case.size:>2}{case.ranks:>8}{case.mean:>10,}{longest:>10}"
    print(f"{sizes}{dealt:>18.0%}{planned:>10.0%}{target:>10}")


def useful_shares(case: Case) -> tuple[float, float]:
    """The share with groups that are dealt in turn, and with the trainer's plan."""
    draws = [draw_groups(case, seed) for seed in range(DRAWS)]
    dealt = [dealt_in_turn(groups, case.ranks).useful_share for groups in draws]
    planned = [
        pack_trees(_flat(groups), BUDGET, case.ranks, EQUAL_LENGTH).useful_share for groups in draws
    ]
    return float(np.mean(dealt)), float(np.mean(planned))


def draw_groups(case: Case, seed: int) -> list[list[Tree]]:
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(case.mean) - SPREAD**2 / 2, SPREAD, (case.groups, case.size))
    rows = np.clip(lengths, 16, case.longest).astype(int).tolist()
    return [[Tree((0,), (length,), (0,)) for length in group] for group in rows]


def dealt_in_turn(groups: list[list[Tree]], ranks: int) -> Plan:
    """Every rank packs its own groups; the n-th packs of all ranks are a round."""
    own = [pack_trees(_flat(groups[rank::ranks]), BUDGET, 1, EQUAL_LENGTH) for rank in range(ranks)]
    packs = [[round[0] for round in plan.rounds] for plan in own]
    rounds = [list(round) for round in itertools.zip_longest(*packs, fillvalue=[])]
    return Plan(rounds, EQUAL_LENGTH)


def _flat(groups: list[list[Tree]]) -> list[Tree]:
    return [tree for group in groups for tree in group]


if __name__ == "__main__":
    run()
