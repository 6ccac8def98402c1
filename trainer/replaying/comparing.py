"""Numbers that were recorded against numbers that came out again."""

import math
from collections.abc import Mapping
from typing import NamedTuple

MEASURED = frozenset({"tokens_per_second"})
"""Metrics of the machine's speed, which nothing makes again."""
SMALL = 0.01
"""Losses lie around 0: below this a difference counts as if the number were this large."""


class Compared(NamedTuple):
    name: str
    recorded: float
    reproduced: float | None
    """None: it did not come out at all."""

    @property
    def difference(self) -> float:
        """0 for the same bits, also where these are no number."""
        if self.reproduced is None:
            return math.inf
        if self.recorded == self.reproduced or self.recorded != self.recorded:
            return 0.0 if str(self.recorded) == str(self.reproduced) else math.inf
        return abs(self.recorded - self.reproduced)

    def is_within(self, tolerance: float) -> bool:
        if not tolerance or not math.isfinite(self.difference):
            return self.difference == 0
        size = max(abs(self.recorded), abs(self.reproduced or 0.0), SMALL)
        return self.difference <= tolerance * size


def compare(recorded: Mapping[str, float], reproduced: Mapping[str, float]) -> list[Compared]:
    return [
        Compared(name, value, reproduced.get(name))
        for name, value in recorded.items()
        if name not in MEASURED
    ]
