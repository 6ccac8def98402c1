"""Which of the closed groups make a batch. Oldest first: any of them may train, none waits for another
prompt, and the rest is for the next batch."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from schemas import DecidedGroup
from trainer.deciding.waiting import Ready

Judged = tuple[Ready, DecidedGroup]


class Chosen(NamedTuple):
    batch: list[Judged]
    """Empty: there are not enough yet."""
    refused: list[Judged]
    """What can no longer be trained, or teaches nothing."""
    waiting: list[Ready]


def choose(
    judged: Sequence[Judged], wanted: int, no_variance: Literal["refill", "shrink"]
) -> Chosen:
    """`refill` looks until it has as many groups as are wanted; `shrink` looks at that many groups
    which could have been trained, and takes those whose rewards differ."""
    refused: list[Judged] = []
    batch: list[Judged] = []
    looked = 0
    for ready, decided in judged:
        if looked == wanted:
            break
        trains = decided.verdict == "train"
        (batch if trains else refused).append((ready, decided))
        counts = decided.verdict == "no_variance" and no_variance == "shrink"
        looked += trains or counts
    rest = [ready for ready, _ in judged[len(batch) + len(refused) :]]
    if looked < wanted:
        return Chosen([], refused, [ready for ready, _ in batch] + rest)
    return Chosen(batch, refused, rest)


def in_turn(
    judged: Iterable[Judged], waiting: Iterable[Ready]
) -> tuple[list[Judged], list[Judged]]:
    """Groups of one prompt are decided in the order in which they closed: those that can be decided
    now, and those that stand behind one that waits."""
    first = {
        _prompt(ready): closed_at(ready) for ready in sorted(waiting, key=closed_at, reverse=True)
    }
    now: list[Judged] = []
    later: list[Judged] = []
    for item in judged:
        ready = item[0]
        behind = first.get(_prompt(ready), closed_at(ready)) < closed_at(ready)
        (later if behind else now).append(item)
    return now, later


def _prompt(ready: Ready) -> tuple[int, str]:
    return ready.group.partition, ready.group.prompt_uid


def closed_at(ready: Ready) -> int:
    assert ready.group.closed_at is not None
    return ready.group.closed_at
