"""The smallest number of groups that a batch takes from environments that state a minimum share.

A batch waits for them, unless their environment has delivered no group for a while: one that is gone
must not stop training. A Decision records the batch, so it does not matter that this looks at a clock.
"""

import time
from collections.abc import Callable, Mapping

from pool.core.groups import Group
from pool.core.shares import EnvironmentShare, read_share


class MinimumShares:
    """`patience_s` is how long an environment may deliver nothing before its minimum is ignored."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._newest: dict[str, tuple[float, EnvironmentShare]] = {}
        """The share that each environment stated in its newest group, and when that was."""

    def note(self, group: Group) -> None:
        """A group was closed."""
        share = share_of(group)
        if share.is_stated:
            self._newest[share.environment] = (self._clock(), share)

    def of_batch(self, groups: int) -> Mapping[str, int]:
        """The least number of groups in a batch, by environment."""
        oldest = self._clock() - self._patience_s
        minimums = {
            name: share.minimum
            for name, (seen, share) in self._newest.items()
            if seen >= oldest and share.minimum > 0
        }
        scale = max(1.0, sum(minimums.values()))
        return {name: int(minimum / scale * groups) for name, minimum in minimums.items()}


def share_of(group: Group) -> EnvironmentShare:
    """The share that the first member's registration states; all members say the same."""
    return read_share(next(iter(group.members.values())).end.metadata)
