"""Compares recorded metrics with reproduced ones."""

import math
from collections.abc import Mapping
from typing import NamedTuple

NOT_REPRODUCIBLE = frozenset({"tokens_per_second", "out_of_memory", "packs"})
"""Metrics of time and memory, not of learning."""
SMALLEST_SCALE = 0.01
"""Losses lie around 0: for smaller numbers, differences are relative to this."""


class MetricComparison(NamedTuple):
    name: str
    recorded: float
    reproduced: float | None
    """None if the metric is missing in the reproduction."""

    @property
    def difference(self) -> float:
        """0 for equal bits, NaN included; infinite if the metric is missing."""
        if self.reproduced is None:
            return math.inf
        if self.recorded == self.reproduced or self.recorded != self.recorded:
            return 0.0 if str(self.recorded) == str(self.reproduced) else math.inf
        return abs(self.recorded - self.reproduced)

    def is_within(self, tolerance: float) -> bool:
        if not tolerance or not math.isfinite(self.difference):
            return self.difference == 0
        scale = max(abs(self.recorded), abs(self.reproduced or 0.0), SMALLEST_SCALE)
        return self.difference <= tolerance * scale


def compare_metrics(
    recorded: Mapping[str, float], reproduced: Mapping[str, float]
) -> list[MetricComparison]:
    return [
        MetricComparison(name, value, reproduced.get(name))
        for name, value in recorded.items()
        if name not in NOT_REPRODUCIBLE
    ]
