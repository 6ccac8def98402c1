"""Batches and buffers are those of the plain rules, and of Atropos' own code."""

from itertools import compress, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.atropos.state.batches import form_in_packs, form_of_any_size
from gateway.atropos.state.buffer import GroupBuffer
from gateway.atropos.state.queue import GroupQueue, QueuedGroup
from tests.gateway.atropos import reference
from tests.gateway.atropos.groups import group

SIZES = st.sampled_from([[1, 2, 4], [1, 2, 3, 4], [2, 4, 8], [3], [0, 1, 2]])
ENV = st.sampled_from([None, 0, 1, 2])


@st.composite
def waiting(draw: st.DrawFn) -> list[QueuedGroup]:
    sizes = st.sampled_from(draw(SIZES))
    drawn = draw(st.lists(st.tuples(sizes, ENV), max_size=14))
    return [group(n, size, env_id) for n, (size, env_id) in enumerate(drawn)]


BATCH_SIZES = st.sampled_from([2, 4, 6, 8, 16])
SHARES = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 1.0, 1.5, -1.0])


def formed(groups: list[QueuedGroup], size: int, minimums: dict[int, float]) -> list[int] | None:
    batch = form_in_packs(GroupQueue(groups), size, minimums)
    return None if batch is None else [g.sequence for g in batch]


@settings(deadline=None)
@given(waiting(), BATCH_SIZES)
def test_a_batch_is_the_one_of_the_rules(groups: list[QueuedGroup], size: int) -> None:
    assert formed(groups, size, {}) == reference.batch(groups, size)


@settings(deadline=None)
@given(waiting(), BATCH_SIZES, st.dictionaries(st.integers(0, 2), SHARES, min_size=1))
def test_a_batch_with_minimums_is_the_one_of_the_rules(
    groups: list[QueuedGroup], size: int, minimums: dict[int, float]
) -> None:
    assert formed(groups, size, minimums) == reference.batch_with_minimums(groups, size, minimums)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), max_size=8), BATCH_SIZES)
def test_any_sizes_that_fill_a_batch_are_used_the_oldest_first(sizes: list[int], size: int) -> None:
    batch = form_of_any_size(GroupQueue(group(n, one) for n, one in enumerate(sizes)), size)
    choices = product((True, False), repeat=len(sizes))
    fitting = (used for used in choices if sum(compress(sizes, used)) == size)
    first = next((list(compress(range(len(sizes)), used)) for used in fitting), None)
    assert (None if batch is None else [g.sequence for g in batch]) == first


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), max_size=10), st.integers(2, 12))
def test_what_leaves_a_buffer_is_what_the_rules_say(sizes: list[int], target: int) -> None:
    buffer, kept = GroupBuffer(target), list[QueuedGroup]()
    for n, size in enumerate(sizes):
        came = group(n, size, 0)
        left = buffer.add(came)
        kept.append(came)
        places = reference.leaving([g.size for g in kept], target)
        assert left == [kept[place] for place in places]
        kept = [g for place, g in enumerate(kept) if place not in places]
        assert buffer.groups == kept


def test_a_target_that_nothing_reaches_costs_nothing() -> None:
    buffer = GroupBuffer(10**20)
    assert [buffer.add(group(n, 3)) for n in range(3)] == [[], [], []]
    assert buffer.sequences == 9


@pytest.mark.parametrize(
    ("sizes", "batch_size", "expected"),
    [
        ([8, 4, 4, 4], 4, None),
        ([3, 3, 3], 8, None),
        ([3, 3, 3], 6, [0, 1]),
        ([2, 1, 1, 4, 1, 2, 1], 8, [3, 0, 5]),
    ],
)
def test_sizes_that_do_not_fit_wait(
    sizes: list[int], batch_size: int, expected: list[int] | None
) -> None:
    batch = formed([group(n, size) for n, size in enumerate(sizes)], batch_size, {})
    assert (batch is None) == (expected is None)
    assert sorted(batch or []) == sorted(expected or [])


@pytest.mark.heavy
@settings(deadline=None)
@given(waiting(), BATCH_SIZES, st.lists(st.tuples(SHARES, st.booleans()), min_size=1, max_size=3))
def test_batches_are_those_of_atropos(
    groups: list[QueuedGroup], size: int, envs: list[tuple[float, bool]]
) -> None:
    peer = pytest.importorskip("atroposlib.api.utils")
    theirs: list[dict[str, Any]] = [
        {"tokens": [[0]] * g.size, "env_id": g.env_id, "sequence": g.sequence} for g in groups
    ]
    batch, _ = peer.grab_exact_from_heterogeneous_queue([dict(g) for g in theirs], size)
    assert formed(groups, size, {}) == (batch and [g["sequence"] for g in batch])
    records = [
        {"registered_id": n, "connected": connected, "min_batch_allocation": share}
        for n, (share, connected) in enumerate(envs)
    ]
    minimums = {n: share for n, (share, connected) in enumerate(envs) if connected}
    batch, _ = peer.grab_batch_with_minimum_allocations(theirs, size, records)
    assert formed(groups, size, minimums) == (batch and [g["sequence"] for g in batch])
