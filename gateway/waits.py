"""How long a refused client should wait, for the Retry-After header of 429 and 503.

A client waits for an event: the trainer decides a group, a call ends, Kafka comes back. If such events
have been seen before, their usual interval says when the next one is due. An event that is overdue, or
that was never seen, is expected to take as long again as clients have waited for it.
"""

import math
from collections import deque
from statistics import median

SHORTEST_S = 1
LONGEST_S = 60
"""Anthropic's clients ignore a longer Retry-After, and OpenAI's give up after two minutes."""
INTERVALS = 8
"""Intervals between events that are remembered; their median does not count a pause of the agents."""


def retry_seconds(wait_s: float) -> int:
    """A wait as the value of Retry-After."""
    return min(LONGEST_S, max(SHORTEST_S, math.ceil(wait_s)))


class EventPace:
    """Estimates when the next event of a kind comes. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._intervals: deque[float] = deque(maxlen=INTERVALS)
        self._waiting_since: float | None = None

    def record(self, at: float) -> None:
        """Records an event."""
        if self._last is not None:
            self._intervals.append(max(0.0, at - self._last))
        self._last = at
        self._waiting_since = None

    def expected_wait(self, now: float) -> float:
        """Seconds until the next event. The caller is a client that waits from now on."""
        if self._waiting_since is None:
            self._waiting_since = now
        waited = now - self._waiting_since
        if self._last is None or not self._intervals:
            return waited
        due = self._last + median(self._intervals)
        return due - now if due > now else min(waited, now - due)
