"""A Decision becomes a batch, read back from the log.

Live training and recovery take the same way: the records that the Decision names, and nothing that a
process remembers, so a batch is the same whenever and wherever it is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pool.core.groups import Group
from pool.core.ledger import GroupId, group_id
from pool.core.marks import runs_of
from pool.core.rows import Row, build_rows, count_target_steps
from pool.core.trajectories import Trajectory, step_of
from schemas import DecidedGroup, Decision
from trainer.algorithm.advantages import Floats, Total, advantages, here
from trainer.algorithm.settings import LossSettings
from trainer.algorithm.shaping import shaped
from trainer.data.sample import Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank trains of a Decision."""

    version: int
    """That it makes."""
    seed: int
    groups: int
    """On all ranks."""
    samples: list[Sample]
    advantages: list[float]
    """Of each sample."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How old a token may be that counts; `run` is the one whose versions can be compared."""

    run: str
    max_age: int
    masks_stale: bool


def shares(decision: Decision, lost: set[GroupId], rank: int, ranks: int) -> list[DecidedGroup]:
    """The groups that a rank reads; all ranks together have each of them once."""
    trained = [g for g in decision.groups if g.verdict == "train" and group_id(g) not in lost]
    return trained[rank::ranks]


def make_batch(
    decision: Decision,
    groups: Sequence[Group],
    loss: LossSettings,
    limits: Limits,
    total: Total = here,
    rank: int = 0,
    ranks: int = 1,
) -> Batch:
    """`groups` are those of this rank, read from the log."""
    assert decision.version is not None
    members = [
        [
            make_sample(group, member, rank + place * ranks, loss, limits, decision.version)
            for member in group.members.values()
        ]
        for place, group in enumerate(groups)
    ]
    rewards: list[Floats] = [np.array([s.reward for s in group]) for group in members]
    worth = advantages(rewards, loss.advantage, total)
    return Batch(
        version=decision.version,
        seed=decision.seed,
        groups=sum(group.verdict == "train" for group in decision.groups),
        samples=[sample for group in members for sample in group],
        advantages=[float(value) for group in worth for value in group],
    )


def make_sample(
    group: Group,
    member: Trajectory,
    place: int,
    loss: LossSettings,
    limits: Limits,
    version: int,
) -> Sample:
    """`version` is the one that the batch makes."""
    truncated = is_truncated(member)
    rows = build_rows(member)
    oldest = version - 1 - limits.max_age
    if member.is_scored or runs_of(member) != {limits.run}:
        rows = tuple(_of_unknown_age(row, version) for row in rows)
    elif limits.masks_stale:
        rows = tuple(_without(row, (row.versions >= 0) & (row.versions < oldest)) for row in rows)
    sample = Sample(
        trajectory_uid=member.uid,
        group=place,
        reward=0.0,
        truncated=truncated,
        rows=rows,
        steps=count_target_steps(member),
    )
    if truncated and loss.mask_truncated:
        rows = tuple(_without(row, row.trainable) for row in rows)
    return replace(sample, reward=reward_of(group, member, loss, sample.generated), rows=rows)


def reward_of(group: Group, member: Trajectory, loss: LossSettings, generated: int) -> float:
    reward = group.reward(member)
    assert reward is not None, "a member without a reward is never trained"
    return shaped(loss, reward, generated)


def is_truncated(member: Trajectory) -> bool:
    last = step_of(member.steps[-1])
    return member.end.status == "truncated" or last.finish_reason == "length"


def _without(row: Row, left_out: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]") -> Row:
    return replace(row, trainable=row.trainable & ~left_out)


def _of_unknown_age(row: Row, version: int) -> Row:
    """Versions of another run say nothing here, and posted trajectories have none. An age of -1 is
    one that nobody knows."""
    return replace(row, versions=np.where(row.versions >= 0, version, -1).astype(np.int32))
