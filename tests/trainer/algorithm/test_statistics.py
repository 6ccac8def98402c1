import json
import subprocess
import sys
from math import exp
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.algorithm.packs import tokens
from trainer.algorithm.objective import objective
from trainer.algorithm.settings import LossSettings
from trainer.algorithm.statistics import PackStatistics

ICEPOP = LossSettings(loss="icepop")
# (c - b, sample, age, entropy)
TOKENS = st.tuples(
    st.floats(-3, 3, width=32), st.integers(0, 3), st.integers(0, 9), st.floats(0, 5)
)


def of(drawn: list[tuple[float, int, int, float]], trajectories: int | None) -> PackStatistics:
    gaps, samples, ages, entropy = zip(*drawn, strict=True) if drawn else ((), (), (), ())
    size = len(drawn)
    pack = tokens(
        list(gaps),
        [0.0] * size,
        [1.0] * size,
        samples=list(samples),
        ages=list(ages),
        entropy=list(entropy),
        trajectories=trajectories,
    )
    return objective(ICEPOP, pack)[1]


def test_every_metric_by_hand() -> None:
    gaps = [0.1, -0.2, 1.0, -1.5]
    pack = tokens(
        [-2 + gap for gap in gaps],
        [-2.0] * 4,
        [1.0] * 4,
        weights=[0.25] * 4,
        samples=[0, 0, 1, 2],
        ages=[0, 0, 2, 5],
        entropy=[1.0, 2.0, 3.0, 4.0],
    )
    ratios = [exp(gap) for gap in gaps]
    kept = [0.25 * r * (2 - gap) for r, gap in zip(ratios[:2], gaps[:2], strict=True)]
    p1, p50, p99 = np.percentile([exp(-0.05), exp(1.0), exp(-1.5)], [1, 50, 99])
    assert objective(ICEPOP, pack)[1].metrics() == pytest.approx(
        {
            "tokens": 4,
            "tokens_age_0": 2,
            "trajectories": 3,
            "loss": sum(kept),
            "ratio_mean": sum(ratios) / 4,
            "ratio_max": exp(1.0),
            "logprob_difference": 0.7,
            "logprob_difference_age_0": 0.15,
            "mismatch_kl": sum(exp(gap) - gap - 1 for gap in gaps) / 4,
            "ess": sum(ratios) ** 2 / (4 * sum(r * r for r in ratios)),
            "masked_fraction": 0.5,
            "masked_high_fraction": 0.25,
            "masked_low_fraction": 0.25,
            "rejected_fraction": 0.0,
            "rejected_trajectories_fraction": 0.0,
            "age_mean": 7 / 4,
            "age_min": 0,
            "age_max": 5,
            "entropy": 2.5,
            "geo_ratio_p1": p1,
            "geo_ratio_p50": p50,
            "geo_ratio_p99": p99,
        },
        rel=1e-5,
    )


def test_what_was_not_seen_is_left_out() -> None:
    metrics = objective(ICEPOP, tokens([-1.0], [-1.0], [1.0], ages=[3]))[1].metrics()
    assert "logprob_difference_age_0" not in metrics
    assert "kl" not in metrics


@settings(max_examples=50)
@given(first=st.lists(TOKENS, max_size=8), second=st.lists(TOKENS, max_size=8))
def test_statistics_of_packs_add_up(
    first: list[tuple[float, int, int, float]], second: list[tuple[float, int, int, float]]
) -> None:
    found = (of(first, 4) + of(second, 4)).metrics()
    assert found == pytest.approx(of(first + second, 4).metrics(), rel=1e-5, abs=1e-6)


def test_packs_with_trajectories_of_their_own_add_up() -> None:
    first, second = [(0.5, 0, 0, 1.0), (0.3, 1, 0, 1.0)], [(-0.5, 0, 0, 1.0)]
    found = (of(first, None) + of(second, None)).metrics()
    moved = [(gap, sample + 2, age, entropy) for gap, sample, age, entropy in second]
    assert found == pytest.approx(of(first + moved, None).metrics())
    assert found["trajectories"] == 3


def test_two_ways_of_numbering_do_not_mix() -> None:
    with pytest.raises(ValueError, match="with all packs, or with none"):
        of([(0.5, 0, 0, 1.0)], 4) + of([(0.5, 0, 0, 1.0)], None)


def test_one_rank_is_all_ranks() -> None:
    statistics = of([(0.5, 0, 0, 1.0)], 1)
    assert statistics.over_ranks() is statistics


@pytest.mark.slow
def test_ranks_see_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.trainer.algorithm.rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    first, second = (json.loads(rank.communicate(timeout=120)[0]) for rank in ranks)
    assert first == second

    pack = tokens(
        [-1.0, -2.0, -0.5, -1.0, -0.3],
        [-1.1, -1.8, -3.0, -1.4, -0.2],
        [1.0, 1.0, 1.0, -1.0, 1.0],
        samples=[0, 2, 2, 3, 2],
        ages=[0, 0, 0, 6, 0],
    )
    assert first == pytest.approx(objective(LossSettings(), pack)[1].metrics(), rel=1e-6)


def test_nothing_but_a_log_prob_has_a_gradient() -> None:
    statistics = of([(0.5, 0, 0, 1.0)], 1)
    assert not any(
        part.requires_grad for part in (statistics.sums, statistics.peaks, statistics.trajectories)
    )
    assert statistics.sums.dtype == torch.float64
