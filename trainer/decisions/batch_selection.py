"""Selects which closed groups make a batch, oldest first.

Any of them may train, none waits for a group of another prompt, and the rest is left for the next
batch. If an environment has a minimum share, as many places are kept for its groups.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from trainer.decisions.minimum_shares import share_of
from trainer.decisions.pending import JudgedGroup, ReadyGroup

NO_MINIMUMS: Mapping[str, int] = {}


class BatchSelection(NamedTuple):
    batch: list[JudgedGroup]
    """Empty if there are not enough groups yet."""
    refused: list[JudgedGroup]
    """Groups that cannot be trained any more, or whose rewards are all equal."""
    waiting: list[ReadyGroup]


def select_batch(
    judged: Sequence[JudgedGroup],
    target: int,
    no_variance: Literal["refill", "shrink"],
    minimums: Mapping[str, int] = NO_MINIMUMS,
) -> BatchSelection:
    """Takes groups in order until `target` of them count. With `refill` only groups that train count;
    with `shrink` groups without variance count too, so the batch may be smaller. `minimums` are the
    places that are kept, by environment."""
    refused: list[JudgedGroup] = []
    batch: list[JudgedGroup] = []
    passed_over: list[ReadyGroup] = []
    places = _Places(target, minimums)
    for number, (ready, decided) in enumerate(judged):
        if not places.left:
            rest = [ready for ready, _ in judged[number:]]
            return BatchSelection(batch, refused, passed_over + rest)
        is_trained = decided.verdict == "train"
        counts = is_trained or (decided.verdict == "no_variance" and no_variance == "shrink")
        if counts and not places.take(ready):
            passed_over.append(ready)
        else:
            (batch if is_trained else refused).append((ready, decided))
    if not places.left:
        return BatchSelection(batch, refused, passed_over)
    undecided = {id(decided) for _, decided in refused}
    waiting = [ready for ready, decided in judged if id(decided) not in undecided]
    return BatchSelection([], refused, waiting)


class _Places:
    """The places of a batch, some of which may be kept for environments."""

    def __init__(self, count: int, kept: Mapping[str, int]) -> None:
        self.left = count
        self._kept = dict(kept)
        self._refused: set[tuple[int, str]] = set()
        """Prompts of groups that found no place: later groups of theirs must not overtake them."""

    def take(self, ready: ReadyGroup) -> bool:
        """Whether there is a place for the group."""
        environment = share_of(ready.group).environment if self._kept else ""
        has_kept = self._kept.get(environment, 0) > 0
        is_free = has_kept or self.left > sum(self._kept.values())
        if not is_free or _prompt(ready) in self._refused:
            self._refused.add(_prompt(ready))
            return False
        if has_kept:
            self._kept[environment] -= 1
        self.left -= 1
        return True


def split_by_turn(
    judged: Iterable[JudgedGroup], waiting: Iterable[ReadyGroup]
) -> tuple[list[JudgedGroup], list[JudgedGroup]]:
    """Separates groups that can be decided now from those that must wait: groups of one prompt are
    decided in the order in which they closed."""
    first_waiting = {
        _prompt(ready): closed_at(ready) for ready in sorted(waiting, key=closed_at, reverse=True)
    }
    decidable: list[JudgedGroup] = []
    postponed: list[JudgedGroup] = []
    for item in judged:
        ready = item[0]
        is_behind = first_waiting.get(_prompt(ready), closed_at(ready)) < closed_at(ready)
        (postponed if is_behind else decidable).append(item)
    return decidable, postponed


def _prompt(ready: ReadyGroup) -> tuple[int, str]:
    return ready.group.partition, ready.group.prompt_uid


def closed_at(ready: ReadyGroup) -> int:
    assert ready.group.closed_at is not None
    return ready.group.closed_at
