"""Groups of one environment that do not have its group size, until some make it up together.

After every group that comes, a set whose sizes sum to the group size is looked for: first greedily in
the order of arrival, then exactly, where the latest groups are preferred. One set at most leaves with
each group that comes. Both searches go on where they stopped, so a buffer that never sums up costs
no more when it is long.
"""

from collections.abc import Iterable

from gateway.atropos.state.queue import Group


class Buffer:
    def __init__(self, target: int, groups: Iterable[Group] = ()) -> None:
        self.target = target
        self._fill(groups)

    @property
    def groups(self) -> list[Group]:
        return list(self._groups)

    @property
    def sequences(self) -> int:
        return self._sequences

    def add(self, group: Group) -> list[Group]:
        """The groups that leave now, in the order in which they came."""
        self._append(group)
        chosen = self._greedy if self._sum == self.target else self._exact()
        if chosen:
            leaving = [self._groups[index] for index in chosen]
            gone = set(chosen)
            self._fill(g for index, g in enumerate(self._groups) if index not in gone)
            return leaving
        return []

    def _fill(self, groups: Iterable[Group]) -> None:
        kept = list(groups)
        self._groups: list[Group] = []
        self._sequences = 0
        self._greedy: list[int] = []
        self._sum = 0
        self._reached = [1]
        """For each number of first groups, the sums that some of them make, as bits."""
        for group in kept:
            self._append(group)

    def _append(self, group: Group) -> None:
        if self._sum < self.target and self._sum + group.size <= self.target:
            self._greedy.append(len(self._groups))
            self._sum += group.size
        self._groups.append(group)
        self._sequences += group.size
        before = self._reached[-1]
        # Neither sizes nor targets are bounded: shifting by one that is of no use may take gigabytes.
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
