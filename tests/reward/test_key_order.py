"""Results leave in the order of their key, and hold up no other key."""

import random

from hypothesis import given
from hypothesis import strategies as st

from reward.worker.key_order import KeyOrder


class Entry:
    def __init__(self, key: str, number: int) -> None:
        self.key, self.number = key, number


@given(st.lists(st.sampled_from("abc"), max_size=30), st.randoms())
def test_each_key_keeps_its_order_and_nothing_is_kept_back(
    keys: list[str], chance: random.Random
) -> None:
    entries = [Entry(key, number) for number, key in enumerate(keys)]
    order: KeyOrder[Entry] = KeyOrder()
    for entry in entries:
        order.add(entry.key, entry)
    shuffled = chance.sample(entries, len(entries))
    left = [ready for entry in shuffled for ready in order.complete(entry.key, entry)]
    assert sorted(entry.number for entry in left) == list(range(len(entries)))
    for key in "abc":
        numbers = [entry.number for entry in left if entry.key == key]
        assert numbers == sorted(numbers)


def test_a_slow_one_holds_up_its_own_key_only() -> None:
    order: KeyOrder[str] = KeyOrder()
    for key, entry in (("a", "a1"), ("a", "a2"), ("b", "b1")):
        order.add(key, entry)
    assert order.complete("a", "a2") == []
    assert order.complete("b", "b1") == ["b1"]
    assert order.complete("a", "a1") == ["a1", "a2"]
