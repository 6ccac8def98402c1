"""Keeps the order of the log among results with the same key.

Functions finish in any order, but the outputs of one prompt must keep the order of their inputs, or
Feedback would overtake its trajectory. A slow judge delays its own prompt and no other.
"""

from collections import deque
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class KeyOrder(Generic[Entry]):
    """`add` in the order of the log; `complete`, in any order, returns the entries that may be written
    now."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Entry]] = {}
        self._done: set[int] = set()

    def add(self, key: str, entry: Entry) -> None:
        self._waiting.setdefault(key, deque()).append(entry)

    def complete(self, key: str, entry: Entry) -> list[Entry]:
        waiting = self._waiting.get(key)
        if waiting is None:
            return []  # nothing was added for this key
        self._done.add(id(entry))
        ready = []
        while waiting and id(waiting[0]) in self._done:
            ready.append(waiting.popleft())
            self._done.discard(id(ready[-1]))
        if not waiting:
            del self._waiting[key]
        return ready
