"""Results in the order of their keys.

Functions finish in any order; what is written for one prompt must keep the order in which it came, or
Feedback would overtake its trajectory. A slow judge holds up its own prompt and no other.
"""

from collections import deque
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class KeyOrder(Generic[Entry]):
    """`add` in the order of the log; `complete` in any order gives what may be written now."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Entry]] = {}
        self._done: set[int] = set()

    def add(self, key: str, entry: Entry) -> None:
        self._waiting.setdefault(key, deque()).append(entry)

    def complete(self, key: str, entry: Entry) -> list[Entry]:
        waiting = self._waiting.get(key)
        if waiting is None:
            return []  # forgotten: its partition went to another worker
        self._done.add(id(entry))
        ready = []
        while waiting and id(waiting[0]) in self._done:
            ready.append(waiting.popleft())
            self._done.discard(id(ready[-1]))
        if not waiting:
            del self._waiting[key]
        return ready
