"""Every loss against numbers worked out by hand, forward and backward."""

from math import exp, log
from typing import Any

import pytest
import torch

from tests.trainer.algorithm.packs import gradient_of, tensor
from trainer.algorithm import losses
from trainer.algorithm.losses import TokenLoss

DPPO = {"d_lo": 0.2, "d_hi": 0.2, "ratio_cap": 20.0}
CLIP = {"e_lo": 0.2, "e_hi": 0.28, "dual_clip": 3.0}


def check(
    found: TokenLoss,
    current: Any,
    *,
    loss: list[float],
    gradient: list[float],
    high: list[int],
    low: list[int],
) -> None:
    assert found.loss.tolist() == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert gradient_of(found.loss, current) == pytest.approx(gradient, rel=1e-5, abs=1e-7)
    assert found.high.int().tolist() == high
    assert found.low.int().tolist() == low


def test_dppo_masks_only_in_the_direction_of_the_advantage() -> None:
    # Probabilities: 0.5 -> 0.8 (up 0.3), 0.5 -> 0.2 (down 0.3), 0.5 -> 0.6 (within).
    before, after = [0.5] * 6, [0.8, 0.8, 0.2, 0.2, 0.6, 0.6]
    current = tensor([log(p) for p in after], gradient=True)
    advantages = [2.0, -2.0, 2.0, -2.0, 2.0, -2.0]
    found = losses.dppo_tv(current, tensor([log(p) for p in before]), tensor(advantages), **DPPO)
    pull = [0.0, 1.6 * 2, -0.4 * 2, 0.0, -1.2 * 2, 1.2 * 2]
    check(
        found,
        current,
        loss=[g * log(p) for g, p in zip(pull, after, strict=True)],
        gradient=pull,
        high=[1, 0, 0, 0, 0, 0],
        low=[0, 0, 0, 1, 0, 0],
    )


def test_dppo_caps_the_weight_of_a_token() -> None:
    # From 0.001 to 0.15: within 0.2 in probability, yet a ratio of 150.
    current = tensor([log(0.15)], gradient=True)
    found = losses.dppo_tv(current, tensor([log(0.001)]), tensor([1.0]), **DPPO)
    check(found, current, loss=[-20 * log(0.15)], gradient=[-20.0], high=[0], low=[0])


def test_ppo_clips_where_the_gain_would_grow() -> None:
    ratios = [1.1, 1.5, 1.5, 0.5, 0.5, 4.0, 4.0, 0.5]
    advantages = [2.0, 2.0, -2.0, 2.0, -2.0, -2.0, 0.0, 0.0]
    current = tensor([-1 + log(ratio) for ratio in ratios], gradient=True)
    found = losses.ppo_clip(current - tensor([-1.0] * 8), tensor(advantages), **CLIP)
    check(
        found,
        current,
        loss=[-2.2, -2 * 1.28, 3.0, -1.0, 2 * 0.8, 3 * 2.0, 0.0, 0.0],
        gradient=[-2.2, 0.0, 3.0, -1.0, 0.0, 0.0, 0.0, 0.0],
        high=[0, 1, 0, 0, 0, 1, 0, 0],
        low=[0, 0, 0, 0, 1, 0, 0, 0],
    )


def test_dual_clip_is_for_negative_advantages_only() -> None:
    current = tensor([log(2.9), log(3.1), log(3.1)], gradient=True)
    found = losses.ppo_clip(current, tensor([-1.0, -1.0, 1.0]), **CLIP)
    check(
        found,
        current,
        loss=[2.9, 3.0, -1.28],
        gradient=[2.9, 0.0, 0.0],
        high=[0, 1, 1],
        low=[0, 0, 0],
    )


def test_cispo_bounds_a_gradient_and_never_removes_it() -> None:
    ratios, advantages = [2.0, 8.0, 8.0, 0.1], [1.5, 1.5, -1.5, 1.5]
    current = tensor([-3.0] * 4, gradient=True)
    log_ratio = tensor([log(ratio) for ratio in ratios])
    found = losses.cispo(current, log_ratio, tensor(advantages), e_lo=1.0, e_hi=4.0)
    pull = [-3.0, -7.5, 7.5, -0.15]
    check(
        found,
        current,
        loss=[-3 * g for g in pull],
        gradient=pull,
        high=[0, 1, 1, 0],
        low=[0, 0, 0, 0],
    )


def test_cispo_has_a_lower_bound_too() -> None:
    current = tensor([-1.0], gradient=True)
    found = losses.cispo(current, tensor([log(0.1)]), tensor([1.0]), e_lo=0.4, e_hi=4.0)
    check(found, current, loss=[0.6], gradient=[-0.6], high=[0], low=[1])


def test_icepop_has_no_gradient_outside_of_its_band() -> None:
    ratios, advantages = [1.9, 2.1, 2.1, 0.6, 0.4, 0.4], [1.0, 1.0, -1.0, 1.0, 1.0, -1.0]
    current = tensor([-2.0] * 6, gradient=True)
    log_ratio = tensor([log(ratio) for ratio in ratios])
    found = losses.icepop(current, log_ratio, tensor(advantages), band_lo=0.5, band_hi=2.0)
    check(
        found,
        current,
        loss=[3.8, 0.0, 0.0, 1.2, 0.0, 0.0],
        gradient=[-1.9, 0.0, 0.0, -0.6, 0.0, 0.0],
        high=[0, 1, 1, 0, 0, 0],
        low=[0, 0, 0, 0, 1, 1],
    )


def test_kpop_masks_by_the_larger_of_both_divergences() -> None:
    def coin(p: float, q: float) -> float:
        return p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))

    after, before = [0.5, 0.9, 0.2, 0.999], [0.6, 0.5, 0.7, 0.9]
    kls = [max(coin(p, q), coin(q, p)) for p, q in zip(after, before, strict=True)]
    assert [kl > 0.1 for kl in kls] == [False, True, True, True]
    assert coin(0.999, 0.9) < 0.1 < coin(0.9, 0.999), "one direction alone would differ"
    current = tensor([log(p) for p in after], gradient=True)
    behaviour = tensor([log(p) for p in before])
    found = losses.kpop(current, behaviour, tensor([-1.0] * 4), kpop_d=0.1, ratio_cap=20.0)
    check(
        found,
        current,
        loss=[5 / 6 * log(0.5), 0.0, 0.0, 0.0],
        gradient=[5 / 6, 0.0, 0.0, 0.0],
        high=[0, 1, 0, 1],
        low=[0, 0, 1, 0],
    )


def test_kpop_survives_certain_tokens() -> None:
    current = tensor([0.0, 0.0, -50.0], gradient=True)
    behaviour = tensor([0.0, -0.01, 0.0])
    found = losses.kpop(current, behaviour, tensor([1.0] * 3), kpop_d=0.1, ratio_cap=20.0)
    assert torch.isfinite(found.loss).all()
    assert found.low.tolist() == [False, False, True]


def test_gspo_clips_a_trajectory_as_one() -> None:
    # Two trajectories of two tokens; the means of c - b are 0.0003 and 0.001.
    means = [0.0003, 0.0003, 0.001, 0.001]
    current = tensor([-1.0, -2.0, -3.0, -4.0], gradient=True)
    found = losses.gspo(current, tensor(means), tensor([2.0] * 4), e_lo=3e-4, e_hi=4e-4)
    inside, clipped = 2 * exp(0.0003), 2 * 1.0004
    check(
        found,
        current,
        loss=[-inside, -inside, -clipped, -clipped],
        gradient=[-inside, -inside, 0.0, 0.0],
        high=[0, 0, 1, 1],
        low=[0] * 4,
    )


def test_gspo_keeps_the_gradient_that_brings_a_trajectory_back() -> None:
    current = tensor([-1.0, -1.0], gradient=True)
    found = losses.gspo(current, tensor([0.01, -0.01]), tensor([-1.0, -1.0]), e_lo=3e-4, e_hi=4e-4)
    check(
        found,
        current,
        loss=[exp(0.01), 1 - 3e-4],
        gradient=[exp(0.01), 0.0],
        high=[0, 0],
        low=[0, 1],
    )


def test_decoupled_weighs_ppo_by_the_way_from_sampling() -> None:
    # rho: 1.5 below the cut-off of 2, 4 above it. The ratio to the proximal policy is 1.1.
    behaviour, proximal = [-2.0, -2.0], [-2 + log(1.5), -2 + log(4.0)]
    current = tensor([p + log(1.1) for p in proximal], gradient=True)
    found = losses.decoupled(
        current - tensor(proximal),
        tensor(proximal) - tensor(behaviour),
        tensor([1.0, -1.0]),
        rho_hi=2.0,
        **CLIP,
    )
    check(
        found,
        current,
        loss=[-1.5 * 1.1, 2 * 1.1],
        gradient=[-1.5 * 1.1, 2 * 1.1],
        high=[0, 0],
        low=[0, 0],
    )


def test_decoupled_may_mask_instead() -> None:
    rhos, ratios = [4.0, 6.0, 0.4, 1.0], [1.0, 1.0, 1.0, 1.5]
    current = tensor([log(ratio) for ratio in ratios], gradient=True)
    found = losses.decoupled(
        current,
        tensor([log(rho) for rho in rhos]),
        tensor([1.0] * 4),
        rho_lo=0.5,
        rho_hi=5.0,
        **CLIP,
    )
    check(
        found,
        current,
        loss=[-4.0, 0.0, 0.0, -1.28],
        gradient=[-4.0, 0.0, 0.0, 0.0],
        high=[0, 1, 0, 1],
        low=[0, 0, 1, 0],
    )


@pytest.mark.parametrize("gap", [30.0, -30.0])
def test_no_ratio_leaves_exp_of_20(gap: float) -> None:
    edge, current = exp(20.0 if gap > 0 else -20.0), tensor([0.0], gradient=True)
    wide = {"e_lo": 1.0, "e_hi": 1e12}
    cispo = losses.cispo(current, tensor([gap]), tensor([1.0]), **wide)
    gspo = losses.gspo(current, tensor([gap]), tensor([1.0]), **wide)
    ppo = losses.ppo_clip(current + gap, tensor([1.0]), dual_clip=3.0, **wide)
    assert gradient_of(cispo.loss, current) == pytest.approx([-edge], rel=1e-5)
    assert gspo.loss.tolist() == pytest.approx([-edge], rel=1e-5)
    assert ppo.loss.tolist() == pytest.approx([-edge], rel=1e-5)
    assert gradient_of(ppo.loss, current) == [0.0], "the clamp itself has no slope"


def test_dppo_keeps_its_gradient_beyond_the_clamp() -> None:
    current = tensor([-1.0, -31.0], gradient=True)
    found = losses.dppo_tv(current, tensor([-31.0, -1.0]), tensor([-1.0, 1.0]), **DPPO)
    assert gradient_of(found.loss, current) == pytest.approx([20.0, -exp(-20.0)])
