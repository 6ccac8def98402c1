"""Records that can never be used: kept as they were, with where they lay and why.

The limiter tells a bad record from a bad deployment. Single bad records go to `dead-letters` and the
partition goes on; when most of what is read is bad, the reader is at fault, and it must stop before
it has drained the topic. The limiter counts records of the log, and a restart reads the newest of
them again, so restarting does not reset it.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from servicekit.errors import TooManyPoison

Headers = Sequence[tuple[str, bytes]]


class DeadLetter(NamedTuple):
    """Where a record lay, and what it was."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp: int

    def headers_with(self, stage: str, reason: str) -> list[tuple[str, bytes]]:
        """The original headers, then ours; the last of a name counts."""
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
    """Looks at the last `window` records of a partition; at least `least` of them must be bad, and
    more than `share`, before it stops the reader."""

    def __init__(self, window: int = 1000, least: int = 100, share: float = 0.5) -> None:
        self._window = window
        self._least = least
        self._share = share
        self._seen = 0
        self._bad: deque[int] = deque()
        """The numbers of the bad ones, counted from the first record seen."""

    def count_good(self) -> None:
        self._seen += 1

    def count_bad(self, reason: str) -> None:
        self._seen += 1
        self._bad.append(self._seen)
        while self._bad[0] <= self._seen - self._window:
            self._bad.popleft()
        looked_at = min(self._seen, self._window)
        if len(self._bad) >= self._least and len(self._bad) > self._share * looked_at:
            raise TooManyPoison(
                f"{len(self._bad)} of the last {looked_at} records cannot be used, the last one "
                f"because {reason}; check that this version fits what writes the topic"
            )
