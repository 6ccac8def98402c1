"""What was computed is remembered, within bounds."""

from gateway.tokens.cache import LruCache


def size(key: str, value: list[int]) -> int:
    return len(key) + len(value)


def test_what_was_used_last_stays() -> None:
    cache: LruCache[str, list[int]] = LruCache(6, size)
    for key in "abc":
        cache.put(key, [0])
    assert cache.get("a") == [0]
    cache.put("d", [0])
    assert [cache.get(key) for key in "abcd"] == [[0], None, [0], [0]]


def test_the_room_is_never_exceeded_and_comes_back() -> None:
    cache: LruCache[str, list[int]] = LruCache(100, size)
    for number in range(1_000):
        cache.put(str(number), [0] * (number % 50))
        held = cache._entries.items()
        assert sum(size(*entry) for entry in held) == 100 - cache._free_bytes <= 100


def test_an_entry_larger_than_the_room_is_not_kept() -> None:
    cache: LruCache[str, list[int]] = LruCache(10, size)
    cache.put("large", [0] * 100)
    assert cache.get("large") is None
    cache.put("a", [1])
    assert cache.get("a") == [1]


def test_the_first_of_two_equal_entries_holds() -> None:
    cache: LruCache[str, list[int]] = LruCache(10, size)
    cache.put("a", [1])
    cache.put("a", [2])
    assert cache.get("a") == [1]
    assert cache._free_bytes == 8
