"""Rows that begin alike become trees, which can be cut anywhere."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.trees import GroupTrees, Ids, Tree

ROWS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=8).map(lambda ids: np.array(ids, np.int32)),
    min_size=1,
    max_size=10,
)


def array(text: str) -> Ids:
    return np.array([ord(letter) for letter in text], np.int32)


def grown(*rows: str, merges: bool = True) -> GroupTrees:
    return GroupTrees([[array(row)] for row in rows], 0, merges=merges)


def distinct_prefixes(rows: list[Ids]) -> int:
    """Nodes of the trie, counted the slow way."""
    return len({tuple(row[: n + 1].tolist()) for row in rows for n in range(len(row))})


def test_shared_ids_are_in_a_tree_once() -> None:
    (tree,) = grown("promptAAA", "promptB", "promptAC").cut(1000)
    assert tree == Tree((0, 2, 1), (9, 8, 7), (0, 7, 6))
    assert tree.tokens == len("prompt") + len("AAA") + len("C") + len("B")


def test_rows_that_share_nothing_stay_rows() -> None:
    assert [tree.rows for tree in grown("abc", "xyz", "mno").cut(1000)] == [(0,), (2,), (1,)]


def test_rows_that_share_too_little_stay_rows() -> None:
    long = "a" * 99
    assert all(tree.shared == (0,) for tree in grown("s" + long, "s" + "b" * 99).cut(1000))


def test_a_row_may_be_the_beginning_of_another() -> None:
    (tree,) = grown("abcd", "ab", "ab").cut(1000)
    assert tree == Tree((1, 2, 0), (2, 2, 4), (0, 2, 2))
    assert tree.tokens == 4


def test_a_tree_is_cut_where_it_repeats_least() -> None:
    group = grown("pmmmma", "pmmmmb", "pnnnna", "pnnnnb")
    first, second = group.cut(8)
    assert (first.rows, second.rows) == ((0, 1), (2, 3))
    assert [tree.tokens for tree in (first, second)] == [7, 7]


def test_what_must_stay_together_does() -> None:
    units = [[array("pa"), array("qa")], [array("pb"), array("qb")]]
    (tree,) = GroupTrees(units, 10, merges=True).cut(1000)
    assert tree == Tree((10, 12, 11, 13), (2, 2, 2, 2), (0, 1, 0, 1))
    trees = GroupTrees(units, 10, merges=True).cut(4)
    assert [tree.rows for tree in trees] == [(10, 11), (12, 13)]


def test_the_cost_of_a_row_counts_its_square() -> None:
    assert Tree((0,), (10,), (0,)).cost(5) == 10 * 10 + 5 * 10
    assert Tree((0, 1), (10, 12), (0, 8)).cost(5) == 100 + (144 - 64) + 5 * 14


@given(ROWS, st.integers(1, 30))
def test_every_row_is_in_one_tree_within_the_limit(rows: list[Ids], limit: int) -> None:
    trees = GroupTrees([[row] for row in rows], 0, merges=True).cut(limit)
    assert sorted(row for tree in trees for row in tree.rows) == list(range(len(rows)))
    for tree in trees:
        own = [rows[number] for number in tree.rows]
        assert tree.lengths == tuple(map(len, own))
        assert tree.tokens <= limit or len(tree.rows) == 1
        assert tree.tokens >= distinct_prefixes(own)
        for before, row, shared in zip(own, own[1:], tree.shared[1:], strict=False):
            assert np.array_equal(before[:shared], row[:shared])


@given(ROWS)
def test_a_whole_tree_has_every_prefix_once(rows: list[Ids]) -> None:
    trees = GroupTrees([[row] for row in rows], 0, merges=True).cut(10**6)
    if any(any(tree.shared) for tree in trees):
        assert sum(tree.tokens for tree in trees) == distinct_prefixes(rows)
