"""What was computed is remembered, within bounds."""

from gateway.tokens.cache import Memory


def size(key: str, value: list[int]) -> int:
    return len(key) + len(value)


def test_what_was_used_last_stays() -> None:
    memory: Memory[str, list[int]] = Memory(6, size)
    for key in "abc":
        memory.put(key, [0])
    assert memory.get("a") == [0]
    memory.put("d", [0])
    assert [memory.get(key) for key in "abcd"] == [[0], None, [0], [0]]


def test_the_room_is_never_exceeded_and_comes_back() -> None:
    memory: Memory[str, list[int]] = Memory(100, size)
    for number in range(1_000):
        memory.put(str(number), [0] * (number % 50))
        held = memory._entries.items()
        assert sum(size(*entry) for entry in held) == 100 - memory._room <= 100


def test_an_entry_larger_than_the_room_is_not_kept() -> None:
    memory: Memory[str, list[int]] = Memory(10, size)
    memory.put("large", [0] * 100)
    assert memory.get("large") is None
    memory.put("a", [1])
    assert memory.get("a") == [1]


def test_the_first_of_two_equal_entries_holds() -> None:
    memory: Memory[str, list[int]] = Memory(10, size)
    memory.put("a", [1])
    memory.put("a", [2])
    assert memory.get("a") == [1]
    assert memory._room == 8
