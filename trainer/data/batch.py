"""Makes the batch of a Decision from its groups, read back from the log.

Live training and recovery do this the same way: from the records that the Decision names, and from
nothing in memory. A batch is therefore the same whenever and wherever it is made.
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
from trainer.algorithm.advantages import Floats, Total, compute_advantages, single_rank
from trainer.algorithm.settings import LossSettings
from trainer.algorithm.shaping import shape_reward
from trainer.data.sample import Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """The part of a Decision's batch that one rank trains."""

    version: int
    """The version that this batch makes."""
    seed: int
    groups: int
    """Number of groups on all ranks."""
    samples: list[Sample]
    advantages: list[float]
    """One per sample."""


@dataclass(frozen=True, slots=True)
class AgeLimits:
    """How old a trained token may be. Age is known only for tokens sampled in `run`."""

    run: str
    max_age: int
    masks_stale: bool
    """Whether older tokens are masked. If not, the whole trajectory was refused before."""


def groups_of_rank(
    decision: Decision, lost: set[GroupId], rank: int, ranks: int
) -> list[DecidedGroup]:
    """The groups that a rank reads; together, the ranks read each trained group once."""
    trained = [g for g in decision.groups if g.verdict == "train" and group_id(g) not in lost]
    return trained[rank::ranks]


def make_batch(
    decision: Decision,
    groups: Sequence[Group],
    loss: LossSettings,
    limits: AgeLimits,
    total: Total = single_rank,
    rank: int = 0,
    ranks: int = 1,
) -> Batch:
    """`groups` are the groups of this rank, read from the log."""
    assert decision.version is not None
    members = [
        [
            make_sample(group, member, rank + index * ranks, loss, limits, decision.version)
            for member in group.members.values()
        ]
        for index, group in enumerate(groups)
    ]
    rewards: list[Floats] = [np.array([s.reward for s in group]) for group in members]
    advantages_by_group = compute_advantages(rewards, loss.advantage, total)
    return Batch(
        version=decision.version,
        seed=decision.seed,
        groups=sum(group.verdict == "train" for group in decision.groups),
        samples=[sample for group in members for sample in group],
        advantages=[float(value) for group in advantages_by_group for value in group],
    )


def make_sample(
    group: Group,
    member: Trajectory,
    group_index: int,
    loss: LossSettings,
    limits: AgeLimits,
    version: int,
) -> Sample:
    """`version` is the version that the batch makes."""
    is_cut = is_truncated(member)
    rows = build_rows(member)
    oldest = version - 1 - limits.max_age
    if member.is_scored or runs_of(member) != {limits.run}:
        rows = tuple(_with_unknown_age(row, version) for row in rows)
    elif limits.masks_stale:
        rows = tuple(_mask(row, (row.versions >= 0) & (row.versions < oldest)) for row in rows)
    sample = Sample(
        trajectory_uid=member.uid,
        group=group_index,
        reward=0.0,
        truncated=is_cut,
        rows=rows,
        steps=count_target_steps(member),
    )
    if is_cut and loss.mask_truncated:
        rows = tuple(_mask(row, row.trainable) for row in rows)
    return replace(sample, reward=shaped_reward(group, member, loss, sample.generated), rows=rows)


def shaped_reward(group: Group, member: Trajectory, loss: LossSettings, generated: int) -> float:
    """The reward of a member after overlong shaping."""
    reward = group.reward(member)
    assert reward is not None, "a member without a reward is never trained"
    return shape_reward(loss, reward, generated)


def is_truncated(member: Trajectory) -> bool:
    last = step_of(member.steps[-1])
    return member.end.status == "truncated" or last.finish_reason == "length"


def _mask(row: Row, masked: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]") -> Row:
    return replace(row, trainable=row.trainable & ~masked)


def _with_unknown_age(row: Row, version: int) -> Row:
    """Sets the age of sampled tokens to -1, which means unknown: versions of another run cannot be
    compared with ours, and posted trajectories have none."""
    return replace(row, versions=np.where(row.versions >= 0, version, -1).astype(np.int32))
