from functools import partial

import numpy as np
import pytest

from bench.training import balance
from trainer.data.packing import Plan
from trainer.data.packing import pack_trees as _pack_trees
from trainer.data.packing import plan_packs as _plan_packs
from trainer.data.trees import GroupTrees, Tree

EQUAL_LENGTH = 8192
pack_trees = partial(_pack_trees, equal_length=EQUAL_LENGTH)
plan_packs = partial(_plan_packs, equal_length=EQUAL_LENGTH)


def rows(*lengths: int) -> list[Tree]:
    return [Tree((number,), (length,), (0,)) for number, length in enumerate(lengths)]


def drawn(count: int, mean: float = 6, seed: int = 0) -> list[Tree]:
    lengths = np.random.default_rng(seed).lognormal(mean, 0.8, count).astype(int)
    return rows(*(min(max(int(length), 1), 3000) for length in lengths))


def packs(plan: Plan) -> list[list[Tree]]:
    return [pack for round in plan.rounds for pack in round if pack]


def numbers(plan: Plan) -> list[list[int]]:
    return [[number for tree in pack for number in tree.rows] for pack in packs(plan)]


def tokens(plan: Plan) -> list[int]:
    return [sum(tree.tokens for tree in pack) for pack in packs(plan)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_every_tree_is_in_one_pack_and_no_pack_is_over_the_budget(ranks: int) -> None:
    plan = pack_trees(drawn(300), 4096, ranks)
    assert sorted(number for pack in numbers(plan) for number in pack) == list(range(300))
    assert max(tokens(plan)) <= 4096
    assert all(len(round) == ranks for round in plan.rounds)


def test_packs_are_nearly_as_few_as_can_be_and_nearly_as_full() -> None:
    trees = drawn(300)
    plan = pack_trees(trees, 8192, 1)
    assert plan.packs <= -(-sum(tree.tokens for tree in trees) // 8192) + 1
    assert min(tokens(plan)) > 0.7 * max(tokens(plan))


def test_ranks_work_equally_long() -> None:
    assert pack_trees(drawn(300), 4096, 8).useful_share > 0.95


def test_the_squares_of_lengths_are_balanced() -> None:
    plan = pack_trees(rows(4000, *[100] * 40), 6000, 2)
    ((first, second),) = plan.costs()
    assert first < 1.5 * second and second < 1.5 * first


def test_a_tree_over_the_budget_has_a_pack_of_its_own() -> None:
    assert numbers(pack_trees(rows(5, 100, 5), 20, 1)) == [[1], [0, 2]]


def test_while_one_rank_runs_a_long_row_the_others_fill_up_to_it() -> None:
    plan = pack_trees(rows(100, *[10] * 10), 20, 2)
    assert numbers(plan) == [[0], list(range(1, 11))]


def test_without_a_budget_every_row_has_its_own_pack() -> None:
    plan = pack_trees(rows(7, 9, 8), 0, 2)
    assert numbers(plan) == [[1], [2], [0]]
    assert [len(round) for round in plan.rounds] == [2, 2]


def test_the_costliest_round_comes_first_and_the_result_is_always_the_same() -> None:
    plan = pack_trees(drawn(100, seed=3), 3000, 2)
    assert plan == pack_trees(drawn(100, seed=3), 3000, 2)
    durations = [max(round) for round in plan.costs()]
    assert durations == sorted(durations, reverse=True)


def test_nothing_gives_no_packs() -> None:
    plan = plan_packs([], 100, 2)
    assert plan.rounds == [] and plan.duration == 0


def group(prompt: int, *answers: int) -> GroupTrees:
    """Rows of one prompt, with answers of these lengths."""
    ids = [
        np.concatenate([np.zeros(prompt), np.full(length, 1 + number)]).astype(np.int32)
        for number, length in enumerate(answers)
    ]
    return GroupTrees([[row] for row in ids], 0, merges=True)


def test_alone_a_rank_computes_every_prompt_once() -> None:
    plan = plan_packs([group(100, *[10] * 8)], 1000, 1)
    assert plan.tokens == 100 + 8 * 10


def test_a_group_is_cut_if_a_pack_has_no_room_for_it() -> None:
    plan = plan_packs([group(100, *[50] * 8)], 300, 1)
    assert plan.packs == 2
    assert plan.tokens == 2 * 100 + 8 * 50


def test_a_group_is_cut_if_other_ranks_would_wait_for_it() -> None:
    plan = plan_packs([group(10, *[100] * 8)], 2000, 4)
    assert plan.tokens > 10 + 8 * 100
    assert plan.useful_share > 0.9
    whole = pack_trees(group(10, *[100] * 8).cut(2000), 2000, 4)
    assert whole.useful_share == 0.25
    assert plan.duration < whole.duration / 3


def test_a_cost_is_the_time_of_a_layer() -> None:
    assert pack_trees(rows(10), 20, 1).duration == 10 * (10 + EQUAL_LENGTH)


@pytest.mark.parametrize("case", balance.CASES)
def test_log_normal_lengths_keep_ranks_busy(case: balance.Case) -> None:
    dealt, planned = balance.useful_shares(case)
    assert planned >= case.target
    assert planned > dealt + 0.2
