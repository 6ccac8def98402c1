"""Statistics of streams, in constant memory."""

import heapq
import math
from typing import Generic, TypeVar

import msgspec

Change = TypeVar("Change")


class Moments(msgspec.Struct):
    """Mean and spread of a stream of numbers (Welford's algorithm)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self.squares += before * (value - self.mean)

    @property
    def spread(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class Largest(Generic[Change]):
    """The largest `limit` changes of a stream; of equal ones, those that are first in the log."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heap: list[tuple[float, int, int, Change]] = []

    def add(self, size: float, partition: int, offset: int, change: Change) -> None:
        heapq.heappush(self._heap, (size, -partition, -offset, change))
        if len(self._heap) > self._limit:
            heapq.heappop(self._heap)

    def sorted(self) -> list[Change]:
        return [
            change for *_, change in sorted(self._heap, key=lambda kept: kept[:3], reverse=True)
        ]
