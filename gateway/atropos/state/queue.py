"""Groups that wait for a batch, in the order in which they came.

Environments ask for the numbers below ten times a second each, so they are kept up to date, never
counted again.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from schemas import Position, ScoredGroup


@dataclass(frozen=True, slots=True)
class Group:
    """A scored group and where it lies in `rewarded`."""

    sequence: int
    env_id: int | None
    size: int
    """Sequences of tokens in it."""
    record: ScoredGroup
    place: Position


def group_of(record: ScoredGroup, place: Position) -> Group:
    return Group(record.sequence, record.env_id, len(record.tokens), record, place)


class Queue:
    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self._groups: dict[int, Group] = {}
        self._sizes: dict[int | None, Counter[int]] = {}
        """How many groups of each size an environment has here; None are those of nobody."""
        self._all_sizes: Counter[int] = Counter()
        self.sequences: Counter[int | None] = Counter()
        """By environment."""
        for group in groups:
            self.add(group)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._groups

    @property
    def largest(self) -> int:
        return max(self._all_sizes, default=0)

    def largest_of(self, env_id: int) -> int:
        return max(self._sizes.get(env_id, ()), default=0)

    def add(self, group: Group) -> None:
        self._groups[group.sequence] = group
        self._all_sizes[group.size] += 1
        self._sizes.setdefault(group.env_id, Counter())[group.size] += 1
        self.sequences[group.env_id] += group.size

    def take(self, sequence: int) -> Group:
        group = self._groups.pop(sequence)
        own = self._sizes[group.env_id]
        self.sequences[group.env_id] -= group.size
        for sizes in (self._all_sizes, own):
            sizes[group.size] -= 1
            if not sizes[group.size]:
                del sizes[group.size]
        if not own:
            del self._sizes[group.env_id], self.sequences[group.env_id]
        return group
