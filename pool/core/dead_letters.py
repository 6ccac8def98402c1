"""Records that can never be used: kept unchanged, with their position and the reason.

The limiter tells a bad record from a bad deployment. Single bad records go to `dead-letters` and
reading continues. When most records are bad, the reader is at fault and must stop before it has
drained the topic. The limiter counts records of the log, and a restart reads the newest of them
again, so restarting does not reset it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pool.core.failure_rate import FailureRate
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
    """Stops the reader when too many of the last records of a partition are bad."""

    def __init__(self, window: int = 1000, least: int = 100, share: float = 0.5) -> None:
        self._rate = FailureRate(window, least, share)

    def count_good(self) -> None:
        self._rate.count_good()

    def count_bad(self, reason: str) -> None:
        if self._rate.count_bad():
            raise TooManyPoison(
                f"{self._rate} records cannot be used, the last one because {reason}; check that this "
                "version fits what writes the topic"
            )
