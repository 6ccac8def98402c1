"""Groups that wait for a batch, in the order of their arrival.

Each environment polls ten times a second for numbers of the queue, so counts are kept up to date
instead of being computed per poll.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from schemas import Position, ScoredGroup


@dataclass(frozen=True, slots=True)
class QueuedGroup:
    """A scored group and its position in `rewarded`."""

    sequence: int
    env_id: int | None
    size: int
    """Number of token sequences."""
    record: ScoredGroup
    position: Position


def queued_group(record: ScoredGroup, position: Position) -> QueuedGroup:
    return QueuedGroup(record.sequence, record.env_id, len(record.tokens), record, position)


class GroupQueue:
    def __init__(self, groups: Iterable[QueuedGroup] = ()) -> None:
        self._groups: dict[int, QueuedGroup] = {}
        self._sizes: dict[int | None, Counter[int]] = {}
        """Number of groups by environment and size; None is for groups without an environment."""
        self._all_sizes: Counter[int] = Counter()
        self.sequences: Counter[int | None] = Counter()
        """Number of token sequences by environment."""
        for group in groups:
            self.add(group)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[QueuedGroup]:
        return iter(self._groups.values())

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._groups

    @property
    def largest(self) -> int:
        return max(self._all_sizes, default=0)

    def largest_of(self, env_id: int) -> int:
        return max(self._sizes.get(env_id, ()), default=0)

    def groups_of(self, env_id: int) -> int:
        return sum(self._sizes.get(env_id, Counter()).values())

    def add(self, group: QueuedGroup) -> None:
        self._groups[group.sequence] = group
        self._all_sizes[group.size] += 1
        self._sizes.setdefault(group.env_id, Counter())[group.size] += 1
        self.sequences[group.env_id] += group.size

    def take(self, sequence: int) -> QueuedGroup:
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
