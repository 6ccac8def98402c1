"""Tells single failures from a broken deployment, by their share of what was tried last."""

from collections import deque


class FailureRate:
    """Of the last `window` attempts, at least `least` and more than the share `share` must fail before
    something is considered broken."""

    def __init__(self, window: int = 1000, least: int = 100, share: float = 0.5) -> None:
        self._window = window
        self._least = least
        self._share = share
        self._seen = 0
        self._bad: deque[int] = deque()
        """The numbers of the failures, counted from the first attempt."""

    def __str__(self) -> str:
        return f"{len(self._bad)} of the last {min(self._seen, self._window)}"

    def count_good(self) -> None:
        self._seen += 1

    def count_bad(self) -> bool:
        """Counts a failure; returns whether there are too many."""
        self._seen += 1
        self._bad.append(self._seen)
        while self._bad[0] <= self._seen - self._window:
            self._bad.popleft()
        in_window = min(self._seen, self._window)
        return len(self._bad) >= self._least and len(self._bad) > self._share * in_window
