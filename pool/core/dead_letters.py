"""Records that can never be used: kept unchanged, with their position and the reason.

The limiter tells a bad record from a bad deployment. Single bad records go to `dead-letters` and
reading continues. When most records are bad, the reader is at fault and must stop before it has
drained the topic. The limiter counts records of the log, and a restart reads the newest of them
again, so restarting does not reset it.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from servicekit.errors import TooManyPoison

Headers = Sequence[tuple[str, bytes]]


class DeadLetter(NamedTuple):
    """An unusable record as it was in its topic."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp: int

    def headers_with(self, stage: str, reason: str) -> list[tuple[str, bytes]]:
        """The original headers, then ours; of headers with the same name the last counts."""
        ours = {
            "steplog.topic": self.topic,
            "steplog.partition": str(self.partition),
            "steplog.offset": str(self.offset),
            "steplog.timestamp": str(self.timestamp),
            "steplog.stage": stage,
            "steplog.reason": reason,
        }
        return [*self.headers, *((name, text.encode()) for name, text in ours.items())]


class PoisonLimiter:
    """Stops the reader when, of the last `window` records of a partition, at least `least` and more
    than the share `share` are bad."""

    def __init__(self, window: int = 1000, least: int = 100, share: float = 0.5) -> None:
        self._window = window
        self._least = least
        self._share = share
        self._seen = 0
        self._bad: deque[int] = deque()
        """The numbers of the bad records, counted from the first record."""

    def count_good(self) -> None:
        self._seen += 1

    def count_bad(self, reason: str) -> None:
        self._seen += 1
        self._bad.append(self._seen)
        while self._bad[0] <= self._seen - self._window:
            self._bad.popleft()
        in_window = min(self._seen, self._window)
        if len(self._bad) >= self._least and len(self._bad) > self._share * in_window:
            raise TooManyPoison(
                f"{len(self._bad)} of the last {in_window} records cannot be used, the last one "
                f"because {reason}; check that this version fits what writes the topic"
            )
