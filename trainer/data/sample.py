"""A trajectory as a member of a batch."""

from dataclasses import dataclass

import numpy as np

from pool.core.rows import Row


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory of a batch."""

    trajectory_uid: str
    group: int
    """Index of its group in the batch."""
    reward: float
    """After overlong shaping."""
    truncated: bool
    """Its last Step stopped at the length limit, or its TrajectoryEnd has the status `truncated`."""
    rows: tuple[Row, ...]
    steps: int = 1
    """Number of Steps that the rows are made of."""
    turn_advantages: tuple[float, ...] = ()
    """With turn-level credit, the advantage of every turn; the rows have them for their tokens."""

    @property
    def generated(self) -> int:
        """Number of sampled tokens, trainable or not."""
        return sum(int(np.count_nonzero(row.versions >= 0)) for row in self.rows)
