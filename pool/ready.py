"""Closed groups that wait for a decision: a bounded queue, oldest first."""

from collections import deque
from collections.abc import Callable

from pool.groups import Group
from pool.progress import Work


class ReadyGroups:
    """First in, first out. When it is full the oldest group leaves, for the caller to record: a
    dropped group has a verdict like any other."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Work[Group]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, work: Work[Group]) -> Work[Group] | None:
        """Adds a group; gives back the one that had to leave for it."""
        self._waiting.append(work)
        return self._waiting.popleft() if len(self._waiting) > self._limit else None

    def take(self, count: int) -> list[Work[Group]]:
        """Up to `count` groups, oldest first."""
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]

    def keep(self, is_ours: Callable[[Work[Group]], bool]) -> None:
        """Forgets the groups whose partition was lost: its next owner has them."""
        self._waiting = deque(work for work in self._waiting if is_ours(work))
