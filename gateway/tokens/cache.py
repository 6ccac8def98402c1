"""Memory of what was computed: bounded in bytes, what was used last stays longest."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Memory(Generic[Key, Value]):
    """`size` tells the bytes of an entry. Long prompts are rendered in threads, so it has a lock."""

    def __init__(self, room: int, size: Callable[[Key, Value], int]) -> None:
        self._room = room
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
                return  # another thread was quicker
            self._entries[key] = value
            self._room -= self._size(key, value)
            while self._room < 0:
                self._room += self._size(*self._entries.popitem(last=False))
