"""Compares two sets of rewards: for single trajectories, and for the groups they would train in.

Groups are filled per prompt in the order in which trajectories ended, with everything in the log. A
group that never filled counts with the members it has, as after its deadline. A group is trainable on
a side if enough of its members are usable there and their rewards differ. A member changes sign if it
is above its group's mean on one side and below it on the other.

The fields of the structs are the keys of the command's JSON output.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

import msgspec

from pool.core.groups import GroupRules, required_members
from replay.diff.paired_rewards import RewardPair, Side, SideReward
from replay.diff.statistics import Largest, Moments

EQUAL = 1e-6
"""Rewards that differ by no more count as equal."""
BIN_EDGES = (-1.0, -0.5, -0.1, -EQUAL, EQUAL, 0.1, 0.5, 1.0)

GroupChange = Literal["becomes trainable", "is no longer trainable", "changes sign"]


class Distribution(msgspec.Struct, frozen=True):
    count: int
    mean: float | None
    spread: float | None

    @classmethod
    def of(cls, moments: Moments) -> "Distribution":
        if not moments.count:
            return cls(0, None, None)
        return cls(moments.count, moments.mean, moments.spread)


class FunctionRewards(msgspec.Struct, frozen=True):
    """The rewards that one version of a function gave on one side."""

    side: Side
    name: str
    version: str
    rewards: Distribution


class Bin(msgspec.Struct, frozen=True):
    """The number of changes in [low, high); None means no limit."""

    low: float | None
    high: float | None
    count: int


class ChangedTrajectory(msgspec.Struct, frozen=True):
    trajectory_uid: str
    prompt_uid: str
    partition: int
    offset: int
    """Of its End in `steps`."""
    old: float
    new: float


class ChangedGroup(msgspec.Struct, frozen=True):
    prompt_uid: str
    partition: int
    first_offset: int
    """Of its oldest record in `steps`."""
    change: GroupChange = msgspec.field(name="what")
    members: int
    flipped: int
    """Members that change sign."""


class Comparison(msgspec.Struct, frozen=True):
    old_topic: str
    new_topic: str
    in_both: int
    only_old: int
    only_new: int
    old: Distribution
    new: Distribution
    correlation: float | None
    changes: list[Bin]
    flipped: int
    """Trajectories that change sign."""
    groups: int
    trainable_old: int
    trainable_new: int
    become_trainable: int
    no_longer_trainable: int
    change_sign: int
    functions: list[FunctionRewards]
    changed_groups: list[ChangedGroup]
    changed_trajectories: list[ChangedTrajectory]


class Comparer:
    """Compares the trajectories of one prompt after the other; keeps `limit` changes of each kind."""

    def __init__(self, rules: GroupRules, limit: int) -> None:
        self._rules = rules
        self._limit = limit
        self._present = {(True, True): 0, (True, False): 0, (False, True): 0}
        self._old, self._new = Moments(), Moments()
        self._product = 0.0
        self._bins = [0] * (len(BIN_EDGES) + 1)
        self._flipped = self._groups = 0
        self._trainable = {(True, True): 0, (True, False): 0, (False, True): 0, (False, False): 0}
        self._sign_groups = 0
        self._changed_groups: dict[GroupChange, Largest[ChangedGroup]] = {
            change: Largest(limit) for change in get_args(GroupChange)
        }
        self._changed_trajectories: Largest[ChangedTrajectory] = Largest(limit)

    def add(self, pairs: Sequence[RewardPair]) -> None:
        for pair in pairs:
            self._present[pair.old is not None, pair.new is not None] += 1
            if pair.old is not None and pair.new is not None:
                self._compare(pair, pair.old.reward, pair.new.reward)
        for group in fill(pairs, self._rules.group_size):
            self._compare_group(group)

    def _compare(self, pair: RewardPair, old: float | None, new: float | None) -> None:
        if old is None or new is None:
            return
        before = old - self._old.mean
        self._old.add(old)
        self._new.add(new)
        self._product += before * (new - self._new.mean)
        self._bins[sum(new - old >= edge for edge in BIN_EDGES)] += 1
        if abs(new - old) >= EQUAL:
            changed = ChangedTrajectory(
                pair.uid, pair.prompt, pair.partition, pair.offset, old, new
            )
            self._changed_trajectories.add(abs(new - old), pair.partition, pair.offset, changed)

    def _compare_group(self, group: Sequence[RewardPair]) -> None:
        size = group[0].size or self._rules.group_size
        quorum = required_members(self._rules.quorum, size)
        old = signs([pair.old for pair in group], quorum)
        new = signs([pair.new for pair in group], quorum)
        flipped = sum(a * b < 0 for a, b in zip(old, new, strict=True))
        self._groups += 1
        self._flipped += flipped
        self._sign_groups += flipped > 0
        trainable = any(old), any(new)
        self._trainable[trainable] += 1
        if trainable[0] != trainable[1]:
            self._note(
                group, "becomes trainable" if trainable[1] else "is no longer trainable", flipped
            )
        elif flipped:
            self._note(group, "changes sign", flipped)

    def _note(self, group: Sequence[RewardPair], change: GroupChange, flipped: int) -> None:
        first = min(pair.began for pair in group)
        changed = ChangedGroup(
            group[0].prompt, group[0].partition, first, change, len(group), flipped
        )
        self._changed_groups[change].add(flipped, changed.partition, first, changed)

    def comparison(
        self, old_topic: str, new_topic: str, functions: Sequence[FunctionRewards]
    ) -> Comparison:
        return Comparison(
            old_topic=old_topic,
            new_topic=new_topic,
            in_both=self._present[True, True],
            only_old=self._present[True, False],
            only_new=self._present[False, True],
            old=Distribution.of(self._old),
            new=Distribution.of(self._new),
            correlation=self._correlation(),
            changes=list(map(Bin, (None, *BIN_EDGES), (*BIN_EDGES, None), self._bins)),
            flipped=self._flipped,
            groups=self._groups,
            trainable_old=self._trainable[True, True] + self._trainable[True, False],
            trainable_new=self._trainable[True, True] + self._trainable[False, True],
            become_trainable=self._trainable[False, True],
            no_longer_trainable=self._trainable[True, False],
            change_sign=self._sign_groups,
            functions=list(functions),
            changed_groups=[
                changed for largest in self._changed_groups.values() for changed in largest.sorted()
            ],
            changed_trajectories=self._changed_trajectories.sorted(),
        )

    def _correlation(self) -> float | None:
        both = self._old.squares * self._new.squares
        return self._product / math.sqrt(both) if both > 0 else None


def fill(pairs: Iterable[RewardPair], default_size: int) -> Iterator[list[RewardPair]]:
    """The groups of one prompt. A trajectory that began before a group was full and ended after is
    late, and belongs to none."""
    group: list[RewardPair] = []
    closed_at = 0
    for pair in pairs:
        if pair.began < closed_at:
            continue
        group.append(pair)
        if len(group) >= (group[0].size or default_size):
            yield group
            group, closed_at = [], pair.offset
    if group:
        yield group


def signs(members: Sequence[SideReward | None], quorum: int) -> list[int]:
    """The sign of each member's advantage; all 0 if the group is not trainable."""
    rewards = [m.reward if m is not None and m.is_usable else None for m in members]
    usable = [reward for reward in rewards if reward is not None]
    if len(usable) < quorum or max(usable) - min(usable) <= EQUAL:
        return [0] * len(members)
    mean = sum(usable) / len(usable)
    return [0 if reward is None else _sign(reward - mean) for reward in rewards]


def _sign(advantage: float) -> int:
    return (advantage > EQUAL) - (advantage < -EQUAL)
