"""Selects which closed groups make a batch, oldest first.

Any of them may train, none waits for a group of another prompt, and the rest is left for the next
batch.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from trainer.decisions.pending import JudgedGroup, ReadyGroup


class BatchSelection(NamedTuple):
    batch: list[JudgedGroup]
    """Empty if there are not enough groups yet."""
    refused: list[JudgedGroup]
    """Groups that cannot be trained any more, or whose rewards are all equal."""
    waiting: list[ReadyGroup]


def select_batch(
    judged: Sequence[JudgedGroup], target: int, no_variance: Literal["refill", "shrink"]
) -> BatchSelection:
    """Takes groups in order until `target` of them count. With `refill` only groups that train count;
    with `shrink` groups without variance count too, so the batch may be smaller."""
    refused: list[JudgedGroup] = []
    batch: list[JudgedGroup] = []
    counted = 0
    for ready, decided in judged:
        if counted == target:
            break
        is_trained = decided.verdict == "train"
        (batch if is_trained else refused).append((ready, decided))
        counts_anyway = decided.verdict == "no_variance" and no_variance == "shrink"
        counted += is_trained or counts_anyway
    rest = [ready for ready, _ in judged[len(batch) + len(refused) :]]
    if counted < target:
        return BatchSelection([], refused, [ready for ready, _ in batch] + rest)
    return BatchSelection(batch, refused, rest)


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
