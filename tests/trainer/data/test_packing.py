import numpy as np

from trainer.data.packing import pack


def tokens(packs: list[list[int]], items: list[list[int]]) -> list[int]:
    return [sum(sum(items[item]) for item in one) for one in packs]


def drawn(count: int, seed: int = 0) -> list[list[int]]:
    lengths = np.random.default_rng(seed).lognormal(6, 0.8, count).astype(int)
    return [[min(max(int(length), 1), 3000)] for length in lengths]


def test_every_item_is_in_one_pack_and_no_pack_is_over_the_budget() -> None:
    items = drawn(300)
    packs = pack(items, 4096)
    assert sorted(item for one in packs for item in one) == list(range(300))
    assert max(tokens(packs, items)) <= 4096


def test_packs_are_nearly_as_few_as_can_be_and_nearly_as_full() -> None:
    items = drawn(300)
    packs = pack(items, 8192)
    fewest = -(-sum(map(sum, items)) // 8192)
    assert len(packs) <= fewest + 1
    sizes = tokens(packs, items)
    assert min(sizes) > 0.7 * max(sizes)


def test_the_squares_of_lengths_are_balanced() -> None:
    items = [[4000], *([100] for _ in range(40))]
    costs = [sum(items[i][0] * (items[i][0] + 8192) for i in one) for one in pack(items, 6000)]
    assert len(costs) == 2
    assert max(costs) < 1.5 * min(costs)


def test_what_belongs_together_stays_together() -> None:
    items = [[10, 20], [30], [5, 5, 5]]
    assert pack(items, 45) == [[0, 2], [1]]


def test_an_item_over_the_budget_has_a_pack_of_its_own() -> None:
    assert pack([[5], [100], [5]], 20) == [[1], [0, 2]]


def test_a_budget_of_one_gives_every_row_its_own_pack() -> None:
    assert pack([[7], [9], [8]], 1) == [[1], [2], [0]]


def test_the_costliest_pack_comes_first_and_the_result_is_always_the_same() -> None:
    items = drawn(100, seed=3)
    packs = pack(items, 3000)
    assert packs == pack(items, 3000)
    costs = [sum(items[i][0] * (items[i][0] + 8192) for i in one) for one in packs]
    assert costs == sorted(costs, reverse=True)


def test_nothing_gives_no_packs() -> None:
    assert pack([], 100) == []
