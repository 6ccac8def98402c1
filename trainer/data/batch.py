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
from pool.core.rows import Row, build_rows, target_step_ids
from pool.core.trajectories import Trajectory, step_of
from schemas import DecidedGroup, Decision
from trainer.algorithm.settings import LossSettings
from trainer.data.credit import Credit, assign_credit
from trainer.data.sample import Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of a Decision, as every rank has it."""

    version: int
    """The version that this batch makes."""
    seed: int
    groups: int
    """Number of groups, including those that have been withdrawn since."""
    samples: list[Sample]
    advantages: list[float]
    """One per sample, for those of its tokens that have none of their own."""


@dataclass(frozen=True, slots=True)
class AgeLimits:
    """How old a trained token may be. Age is known only for tokens sampled in `run`."""

    run: str
    max_age: int
    masks_stale: bool
    """Whether older tokens are masked. If not, the whole trajectory was refused before."""


def trained_groups(decision: Decision, withdrawn: set[GroupId]) -> list[DecidedGroup]:
    """The groups of the batch that are still in the log."""
    return [g for g in decision.groups if g.verdict == "train" and group_id(g) not in withdrawn]


def make_batch(
    decision: Decision, groups: Sequence[Group], loss: LossSettings, limits: AgeLimits
) -> Batch:
    """`groups` are the trained groups, read from the log."""
    assert decision.version is not None
    credit_by_group = assign_credit(groups, loss)
    samples: list[Sample] = []
    for index, (group, of_members) in enumerate(zip(groups, credit_by_group, strict=True)):
        samples += [
            make_sample(member, index, credit, loss, limits, decision.version)
            for member, credit in zip(group.members.values(), of_members, strict=True)
        ]
    return Batch(
        version=decision.version,
        seed=decision.seed,
        groups=sum(group.verdict == "train" for group in decision.groups),
        samples=samples,
        advantages=[credit.advantage for of_members in credit_by_group for credit in of_members],
    )


def make_sample(
    member: Trajectory,
    group_index: int,
    credit: Credit,
    loss: LossSettings,
    limits: AgeLimits,
    version: int,
) -> Sample:
    """`version` is the version that the batch makes."""
    is_cut = is_truncated(member)
    rows = build_rows(member, credit.packed_turns())
    oldest = version - 1 - limits.max_age
    if member.is_scored or runs_of(member) != {limits.run}:
        rows = tuple(_with_unknown_age(row, version) for row in rows)
    elif limits.masks_stale:
        rows = tuple(_mask(row, (row.versions >= 0) & (row.versions < oldest)) for row in rows)
    if is_cut and loss.mask_truncated:
        rows = tuple(_mask(row, row.trainable) for row in rows)
    return Sample(
        trajectory_uid=member.uid,
        group=group_index,
        reward=credit.reward,
        truncated=is_cut,
        rows=rows,
        steps=len(target_step_ids(member)),
        turn_advantages=tuple(credit.turns.values()),
    )


def is_truncated(member: Trajectory) -> bool:
    last = step_of(member.steps[-1])
    return member.status == "truncated" or last.finish_reason == "length"


def _mask(row: Row, masked: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]") -> Row:
    return replace(row, trainable=row.trainable & ~masked)


def _with_unknown_age(row: Row, version: int) -> Row:
    """Sets the age of sampled tokens to -1, which means unknown: versions of another run cannot be
    compared with ours, and posted trajectories have none."""
    return replace(row, versions=np.where(row.versions >= 0, version, -1).astype(np.int32))
