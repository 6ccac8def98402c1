"""A cache that is bounded in bytes and evicts the least recently used entry."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """`size` computes the bytes of an entry. Thread-safe, because long prompts are rendered in
    threads."""

    def __init__(self, max_bytes: int, size: Callable[[Key, Value], int]) -> None:
        self._free_bytes = max_bytes
        self._size = size
        self._lock = Lock()
        self._entries: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def put(self, key: Key, value: Value) -> None:
        with self._lock:
            if key in self._entries:
                return  # another thread was faster
            self._entries[key] = value
            self._free_bytes -= self._size(key, value)
            while self._free_bytes < 0:
                self._free_bytes += self._size(*self._entries.popitem(last=False))
