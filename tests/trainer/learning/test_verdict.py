import random

import pytest

from tests.trainer.learning.verdict import Verdict, judge


def test_the_last_quarter_is_compared_with_the_first() -> None:
    verdict = judge([[0, 2], [9, 9], [9, 9], [4, 6]])
    assert (verdict.first, verdict.last, verdict.difference) == (1, 5, 4)
    # Each quarter: variance 2 of two rewards, so 1 for its mean.
    assert verdict.error == pytest.approx(2**0.5)


def test_three_standard_errors_are_asked_for() -> None:
    assert Verdict(first=1.0, last=1.31, error=0.1).learned
    assert not Verdict(first=1.0, last=1.29, error=0.1).learned
    assert not Verdict(first=1.31, last=1.0, error=0.1).learned


def test_every_trajectory_counts_the_same() -> None:
    verdict = judge([[1], [4, 4, 4], *[[0, 0]] * 4, [5], [9, 9, 9]])
    assert (verdict.first, verdict.last) == (13 / 4, 32 / 4)


def test_rewards_that_stay_the_same_are_not_learning() -> None:
    assert not judge([[0.5, 0.5]] * 8).learned


def test_chance_seldom_looks_like_learning() -> None:
    chance = random.Random(6)
    runs = [[[chance.random() for _ in range(8)] for _ in range(16)] for _ in range(1000)]
    assert sum(judge(rewards).learned for rewards in runs) <= 5


def test_a_small_steady_rise_is_seen() -> None:
    chance = random.Random(6)
    rises = [[chance.random() + version / 50 for _ in range(32)] for version in range(32)]
    assert judge(rises).learned


def test_too_few_versions_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 versions"):
        judge([[1.0, 2.0]] * 3)
