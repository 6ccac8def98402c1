"""Buffer for groups of one environment that do not have its group size.

After every new group, a set whose sizes sum to the group size is searched: first greedily in the order
of arrival, then exactly, preferring the latest groups. At most one set leaves with each new group. Both
searches resume where they stopped, so a buffer that never sums up does not get slower as it grows.
"""

from collections.abc import Iterable

from gateway.atropos.state.queue import QueuedGroup


class GroupBuffer:
    def __init__(self, target: int, groups: Iterable[QueuedGroup] = ()) -> None:
        self.target = target
        self._fill(groups)

    @property
    def groups(self) -> list[QueuedGroup]:
        return list(self._groups)

    @property
    def sequences(self) -> int:
        return self._sequences

    def add(self, group: QueuedGroup) -> list[QueuedGroup]:
        """Adds a group; returns the groups that leave now, in the order of their arrival."""
        self._append(group)
        chosen = self._greedy if self._sum == self.target else self._exact()
        if chosen:
            leaving = [self._groups[index] for index in chosen]
            indices = set(chosen)
            self._fill(g for index, g in enumerate(self._groups) if index not in indices)
            return leaving
        return []

    def _fill(self, groups: Iterable[QueuedGroup]) -> None:
        remaining = list(groups)
        self._groups: list[QueuedGroup] = []
        self._sequences = 0
        self._greedy: list[int] = []
        self._sum = 0
        self._reached = [1]
        """At index n: the sums that subsets of the first n groups have, as a bit set."""
        for group in remaining:
            self._append(group)

    def _append(self, group: QueuedGroup) -> None:
        if self._sum < self.target and self._sum + group.size <= self.target:
            self._greedy.append(len(self._groups))
            self._sum += group.size
        self._groups.append(group)
        self._sequences += group.size
        before = self._reached[-1]
        # Sizes and targets are unbounded; shifting by a size beyond the target could take gigabytes.
        more = before << group.size if group.size <= self.target else 0
        reached = before | more
        if reached.bit_length() > self.target + 1:
            reached &= (2 << max(self.target, 0)) - 1
        self._reached.append(reached)

    def _exact(self) -> list[int]:
        missing = self.target
        if missing <= 0 or not self._reached[-1] >> missing & 1:
            return []
        chosen = []
        for index in reversed(range(len(self._groups))):
            size = self._groups[index].size
            if size <= missing and self._reached[index] >> (missing - size) & 1:
                chosen.append(index)
                missing -= size
        return chosen[::-1]
