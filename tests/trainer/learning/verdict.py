"""Did rewards go up? The last quarter of the versions against the first.

The measure is the standard error of the difference of the two means, over single trajectories. Without
learning their rewards come from one distribution, and a difference of three errors comes by chance once
in some 700 runs.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

ERRORS = 3.0
"""Standard errors by which the last quarter must exceed the first."""


class Verdict(NamedTuple):
    first: float
    """Mean reward of the first quarter."""
    last: float
    error: float
    """Standard error of `difference`."""

    @property
    def difference(self) -> float:
        return self.last - self.first

    @property
    def learned(self) -> bool:
        return self.difference > ERRORS * self.error


def judge(rewards: Sequence[Sequence[float]]) -> Verdict:
    """`rewards` are those of the trajectories that each version was trained with, in order."""
    quarter = len(rewards) // 4
    if not quarter:
        raise ValueError(f"{len(rewards)} versions have no quarters")
    first = [reward for version in rewards[:quarter] for reward in version]
    last = [reward for version in rewards[-quarter:] for reward in version]
    error = math.sqrt(_squared_error(first) + _squared_error(last))
    return Verdict(statistics.fmean(first), statistics.fmean(last), error)


def _squared_error(rewards: list[float]) -> float:
    """Of their mean."""
    return statistics.variance(rewards) / len(rewards)
