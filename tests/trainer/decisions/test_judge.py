"""Verdicts on groups, apart from any log."""

import math
from typing import Any

import pytest

from pool.core.groups import Group
from pool.core.marks import PolicyMarks
from schemas import PolicyVersion, Record
from tests.pool.records import end, group_of, sampled, step
from trainer.algorithm.settings import LossSettings
from trainer.decisions.judge import Judge
from trainer.decisions.settings import DecisionSettings

RUN = "run"


def marks(*opened: int) -> PolicyMarks:
    """Version n was opened when `steps` ended at the n-th offset."""
    return PolicyMarks(
        RUN,
        (
            PolicyVersion(
                run=RUN, incarnation=1, version=version, phase="opened", steps_marks=[offset]
            )
            for version, offset in enumerate(opened)
        ),
    )


def judge(known: PolicyMarks, **fields: Any) -> Judge:
    return Judge(DecisionSettings(group_size=2, **fields), known, LossSettings())


def two(rewards: tuple[float, float] = (0.0, 1.0), **fields: Any) -> Group:
    records: list[Record] = []
    for place, value in enumerate(rewards):
        uid = f"t{place}"
        records += [step(f"s{place}", uid, **fields), end(uid, reward=value)]
    return group_of(*records)


def test_a_fresh_group_with_different_rewards_trains() -> None:
    assert judge(marks(0)).judge(two(), 0).verdict == "train"


def test_equal_rewards_teach_nothing() -> None:
    decided = judge(marks(0)).judge(two((1.0, 1.0)), 0)
    assert (decided.verdict, decided.reason) == ("no_variance", "all rewards are 1")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_a_member_whose_reward_is_no_usable_number_is_invalid(value: float) -> None:
    records: list[Record] = []
    for place, given in enumerate((0.0, 1.0, value)):
        uid = f"t{place}"
        records += [step(f"s{place}", uid, group_size=3), end(uid, reward=given)]
    decided = judge(marks(0)).judge(group_of(*records), 0)
    assert decided.verdict == "train", "the others are compared with each other"
    assert [member.verdict for member in decided.members] == ["train", "train", "invalid"]
    assert decided.members[2].reason == f"its reward, or that of a Step, is {value:g}"


def test_so_is_one_with_such_a_reward_of_a_step() -> None:
    group = two(reward=math.inf)
    decided = judge(marks(0)).judge(group, 0)
    assert {member.verdict for member in decided.members} == {"invalid"}


def test_a_group_ages_while_it_waits() -> None:
    known, group = marks(0, 100, 200, 300), two()
    assert judge(known, max_age=2).judge(group, 2).verdict == "train"
    decided = judge(known, max_age=2).judge(group, 3)
    assert decided.verdict == "too_few"
    assert {member.verdict for member in decided.members} == {"stale"}


def test_masking_keeps_a_trajectory_whose_youngest_tokens_are_fresh() -> None:
    group = two(segments=[sampled(0), sampled(1, first_token=1)])
    known = marks(0, 0, 100)
    assert judge(known, max_age=1).judge(group, 2).verdict == "too_few"
    assert judge(known, max_age=1, stale_tokens="mask").judge(group, 2).verdict == "train"


def test_masking_does_not_keep_what_is_stale_altogether() -> None:
    known = marks(0, 100, 200)
    assert judge(known, max_age=1, stale_tokens="mask").judge(two(), 2).verdict == "too_few"


def test_truncated_sampling_is_invalid_with_the_reason() -> None:
    decided = judge(marks(0)).judge(two(sampling='{"top_p": 0.9}'), 0)
    assert {member.verdict for member in decided.members} == {"invalid"}
    assert "top_p" in decided.members[0].reason


@pytest.mark.parametrize(("accepted", "verdict"), [((), "too_few"), (("other",), "train")])
def test_another_run_is_refused_unless_it_is_accepted(
    accepted: tuple[str, ...], verdict: str
) -> None:
    chosen = judge(marks(0), accept_runs=accepted)
    assert chosen.judge(two(run="other"), 0).verdict == verdict
    assert chosen.can_skip() is not bool(accepted)
