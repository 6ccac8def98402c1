"""A trajectory as the trainer takes it into a batch."""

from dataclasses import dataclass

import numpy as np

from pool.core.rows import Row


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory of a batch."""

    trajectory_uid: str
    group: int
    """Place of its group in the Decision."""
    reward: float
    """Overlong shaping applied."""
    truncated: bool
    """Its last Step ended by length, or its End says so."""
    rows: tuple[Row, ...]
    steps: int = 1
    """That the rows are made of."""

    @property
    def generated(self) -> int:
        """Sampled tokens, trainable or not."""
        return sum(int(np.count_nonzero(row.versions >= 0)) for row in self.rows)
