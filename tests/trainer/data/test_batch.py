"""From a Decision's groups to what a rank trains."""

import dataclasses
from typing import Any

import pytest

from pool.core.groups import Group
from schemas import DecidedGroup, Decision, Record
from tests.pool.records import end, group_of, sampled, step
from trainer.algorithm.settings import LossSettings
from trainer.data.batch import AgeLimits, Batch, make_batch, trained_groups
from trainer.data.batch_metrics import batch_metrics

LIMITS = AgeLimits("run", max_age=2, masks_stale=False)


def group(prompt: str, rewards: tuple[float, ...] = (0.0, 1.0), **fields: Any) -> Group:
    records: list[Record] = []
    for place, reward in enumerate(rewards):
        uid = f"{prompt}-{place}"
        made = step(f"{uid}-s", uid, prompt, response=(4, 5, 6, 7), **fields)
        records += [made, end(uid, prompt, reward=reward)]
    return group_of(*records, size=len(rewards))


def decision(*groups: Group, version: int = 1) -> Decision:
    decided = [
        DecidedGroup(
            prompt_uid=g.prompt_uid,
            partition=0,
            first_offset=n,
            closed_at=g.closed_at or 0,
            verdict="train",
        )
        for n, g in enumerate(groups)
    ]
    return Decision(run="run", incarnation=1, sequence=1, version=version, groups=decided)


def batch_of(
    *groups: Group, loss: LossSettings | None = None, limits: AgeLimits = LIMITS, version: int = 1
) -> Batch:
    made = decision(*groups, version=version)
    return make_batch(made, groups, loss or LossSettings(), limits)


def test_all_rows_of_a_trajectory_share_reward_and_advantage() -> None:
    batch = batch_of(group("a"), group("b", (0.0, 2.0)), loss=LossSettings(advantage="none"))
    assert [sample.reward for sample in batch.samples] == [0, 1, 0, 2]
    assert batch.advantages == [-0.5, 0.5, -1.0, 1.0]
    assert [sample.group for sample in batch.samples] == [0, 0, 1, 1]


def test_withdrawn_groups_are_left_out() -> None:
    from pool.core.ledger import group_id

    made = decision(*(group(name) for name in "abcde"))
    withdrawn = {group_id(made.groups[1])}
    assert [g.prompt_uid for g in trained_groups(made, withdrawn)] == ["a", "c", "d", "e"]


def test_masking_stale_tokens_keeps_the_rest_of_the_row() -> None:
    mixed = group("a", segments=[sampled(0), sampled(2, first_token=3)])
    limits = dataclasses.replace(LIMITS, max_age=1, masks_stale=True)
    (row,) = batch_of(mixed, limits=limits, version=4).samples[0].rows
    assert row.trainable.tolist() == [False] * 6 + [True]
    assert batch_of(mixed, limits=limits, version=4).samples[0].generated == 4


def test_truncated_trajectories_can_leave_the_loss_and_stay_in_the_baseline() -> None:
    cut = group("a", finish_reason="length")
    batch = batch_of(cut, loss=LossSettings(mask_truncated=True, advantage="none"))
    assert not any(row.trainable.any() for sample in batch.samples for row in sample.rows)
    assert batch.advantages == [-0.5, 0.5]
    assert batch_metrics(batch)["truncated_fraction"] == 1


def test_overlong_trajectories_earn_less() -> None:
    loss = LossSettings(overlong_max=4, overlong_buffer=2, advantage="none")
    assert [sample.reward for sample in batch_of(group("a"), loss=loss).samples] == [-1.0, 0.0]


def test_the_age_of_another_run_is_unknown() -> None:
    (row,) = batch_of(group("a", run="other"), version=7).samples[0].rows
    assert set((7 - 1 - row.versions[row.trainable]).tolist()) == {-1}


def test_a_batch_is_described() -> None:
    found = batch_metrics(batch_of(group("a"), group("b", (1.0, 1.0))))
    assert found["trajectories"] == 4
    assert found["reward_mean"] == pytest.approx(0.75)
    assert found["spans_mean"] == 1
    assert found["prefix_break_fraction"] == 0
