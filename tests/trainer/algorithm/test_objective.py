"""How the terms of the loss come together."""

from dataclasses import replace
from math import exp, log

import pytest
import torch

from tests.trainer.algorithm.packs import gradient_of, tensor, tokens
from trainer.algorithm.objective import Tokens, objective
from trainer.algorithm.settings import LossSettings


def loss_and_gradient(settings: LossSettings, pack: Tokens) -> tuple[float, list[float]]:
    loss, _ = objective(settings, pack)
    return loss.item(), gradient_of(loss, pack.current)


def test_the_default_is_dppo_with_drift() -> None:
    pack = tokens([-1.0, -2.0], [-1.1, -1.7], [1.0, -0.5], weights=[0.25, 0.75])
    up, down = exp(0.1), exp(-0.3)
    loss, gradient = loss_and_gradient(LossSettings(), pack)
    first, second = up * 1.0 + 1e-3 * 0.01, -0.5 * down * 2.0 + 1e-3 * 0.09
    assert loss == pytest.approx(0.25 * first + 0.75 * second)
    expected = [0.25 * (-up + 2e-3 * 0.1), 0.75 * (0.5 * down + 2e-3 * -0.3)]
    assert gradient == pytest.approx(expected)


def test_a_masked_token_keeps_its_drift_and_its_weight() -> None:
    pack = tokens([log(0.9), -1.0], [log(0.1), -1.0], [1.0, 1.0], weights=[0.5, 0.5])
    loss, statistics = objective(LossSettings(drift_tau=0.01), pack)
    gap = log(9.0)
    assert loss.item() == pytest.approx(0.5 * 0.01 * gap**2 + 0.5 * 1.0)
    assert gradient_of(loss, pack.current) == pytest.approx([0.5 * 0.02 * gap, -0.5])
    assert statistics.metrics()["masked_high_fraction"] == 0.5


def test_drift_can_be_switched_off_and_on() -> None:
    pack = tokens([-1.0], [-2.0], [0.0])
    assert loss_and_gradient(LossSettings(drift_tau=0), pack) == (0.0, [0.0])
    assert loss_and_gradient(LossSettings(loss="cispo"), pack) == (0.0, [0.0])
    drifting = LossSettings(loss="cispo", drift_tau=0.5)
    loss, gradient = loss_and_gradient(drifting, pack)
    assert (loss, *gradient) == pytest.approx((0.5, 1.0))


@pytest.mark.parametrize("behaviour", [-3e38, 3e38])
def test_drift_and_its_gradient_are_bounded(behaviour: float) -> None:
    loss, gradient = loss_and_gradient(
        LossSettings(drift_tau=0.5), tokens([-1.0], [behaviour], [0.0])
    )
    assert (loss, *gradient) == pytest.approx((0.5 * 20**2, 0.0))


def test_gspo_takes_the_mean_over_a_trajectory_wherever_its_tokens_lie() -> None:
    # Trajectory 0 has tokens 0, 2 and 3: its mean is (0.1 - 0.2 + 0.4) / 3 = 0.1.
    settings = LossSettings(loss="gspo", aggregation="rollout_mean", e_lo=0.5, e_hi=0.5)
    pack = tokens(
        [-1.0, -1.0, -1.0, -1.0],
        [-1.1, -1.3, -0.8, -1.4],
        [1.0, -2.0, 1.0, 1.0],
        weights=[1 / 6, 1 / 2, 1 / 6, 1 / 6],
        samples=[0, 1, 0, 0],
    )
    loss, gradient = loss_and_gradient(settings, pack)
    assert loss == pytest.approx(-exp(0.1) / 2 + exp(0.3))
    assert gradient == pytest.approx([-exp(0.1) / 6, exp(0.3), -exp(0.1) / 6, -exp(0.1) / 6])


def test_a_rejected_trajectory_has_no_policy_gradient_and_keeps_its_weight() -> None:
    settings = LossSettings(sequence_mask="geometric", drift_tau=0.1)
    pack = tokens(
        [-1.0, -1.0, -1.0],
        [-1.0, -1.1, -1.0],
        [1.0] * 3,
        weights=[0.2, 0.2, 0.6],
        samples=[0, 0, 1],
    )
    loss, statistics = objective(settings, pack)
    assert loss.item() == pytest.approx(0.2 * 0.1 * 0.01 + 0.6)
    assert gradient_of(loss, pack.current) == pytest.approx([0.0, 0.2 * 0.2 * 0.1, -0.6])
    metrics = statistics.metrics()
    assert metrics["rejected_fraction"] == pytest.approx(2 / 3)
    assert metrics["rejected_trajectories_fraction"] == pytest.approx(1 / 2)


def test_opsm_rejects_by_the_advantage_of_the_trajectory() -> None:
    settings = LossSettings(loss="icepop", sequence_mask="opsm", opsm_delta=0.05)
    pack = tokens([-1.1, -1.1], [-1.0, -1.0], [-1.0, 1.0], trajectories=5)
    assert loss_and_gradient(settings, pack)[1] == pytest.approx([0.0, -exp(-0.1)])


def test_opsm_looks_at_the_mean_where_tokens_have_advantages_of_their_own() -> None:
    settings = LossSettings(loss="icepop", sequence_mask="opsm", opsm_delta=0.05)
    own = [-3.0, 1.0, 3.0, -1.0]
    pack = tokens([-1.1] * 4, [-1.0] * 4, own, samples=[0, 0, 1, 1])
    gradient = loss_and_gradient(settings, pack)[1]
    assert gradient == pytest.approx([0.0, 0.0, -3 * exp(-0.1), exp(-0.1)])


def test_veto_rejects_by_one_token() -> None:
    settings = LossSettings(loss="icepop", sequence_mask="veto")
    pack = tokens([-1.0, -1.0, -1.0], [-1.0, -9.0, -1.0], [1.0] * 3, samples=[0, 0, 1])
    assert loss_and_gradient(settings, pack)[1] == pytest.approx([0.0, 0.0, -1.0])


def test_geometric_looks_at_the_proximal_policy_where_there_is_one() -> None:
    settings = LossSettings(
        loss="decoupled", ratio="decoupled", optimiser_steps=2, sequence_mask="geometric"
    )
    pack = tokens([-1.0, -1.0], [-1.1, -1.1], [1.0, 1.0], proximal=[-1.1, -1.0])
    loss, _ = objective(settings, pack)
    assert gradient_of(loss, pack.current) == pytest.approx([-exp(0.1), 0.0])


def test_loglinear_lies_between_sampling_and_now_by_age() -> None:
    settings = LossSettings(loss="decoupled", ratio="decoupled", proximal="loglinear")
    pack = tokens([-1.0] * 3, [-1.4] * 3, [1.0] * 3, ages=[0, 1, 3])
    # Age 0: p = b, the ratio 1.49 is clipped. Age 1: half the way, 1.22 each. Age 3: three quarters.
    gradient = loss_and_gradient(settings, pack)[1]
    assert gradient == pytest.approx([0.0, -exp(0.2) * exp(0.2), -exp(0.3) * exp(0.1)])


def test_with_one_step_the_proximal_policy_is_the_current_one() -> None:
    settings = LossSettings(loss="decoupled", ratio="decoupled")
    pack = tokens([-1.0, -1.0], [-1.5, -2.0], [1.0, 1.0])
    assert loss_and_gradient(settings, pack)[1] == pytest.approx([-exp(0.5), -2.0])


def test_log_probs_that_are_needed_are_not_invented() -> None:
    pack = tokens([-1.0], [-1.0], [1.0])
    with pytest.raises(ValueError, match="proximal"):
        objective(LossSettings(loss="decoupled", ratio="decoupled", optimiser_steps=2), pack)
    with pytest.raises(ValueError, match="reference"):
        objective(LossSettings(kl_beta=0.1), pack)


def test_kl_to_the_reference_is_on_every_token() -> None:
    settings = LossSettings(loss="icepop", kl_beta=0.1)
    pack = tokens([-1.0, -1.0], [-1.0, -5.0], [1.0, 1.0], reference=[-0.5, -1.5])
    loss, statistics = objective(settings, pack)
    kls = [exp(0.5) - 1.5, exp(-0.5) - 0.5]
    assert loss.item() == pytest.approx(1.0 + 0.1 * sum(kls))
    assert gradient_of(loss, pack.current) == pytest.approx(
        [-1 + 0.1 * (1 - exp(0.5)), 0.1 * (1 - exp(-0.5))]
    )
    assert statistics.metrics()["kl"] == pytest.approx(sum(kls) / 2)


def test_the_off_policy_form_of_the_kl_has_the_gradient_of_its_ratio() -> None:
    settings = LossSettings(kl_beta=0.1, kl_off_policy=True, kl_estimator="k1", drift_tau=0)
    pack = tokens([-1.0], [-1.2], [0.0], reference=[-1.5])
    loss, gradient = loss_and_gradient(settings, pack)
    assert loss == pytest.approx(0.1 * exp(0.2) * 0.5)
    assert gradient == pytest.approx([0.1 * exp(0.2) * (0.5 + 1)])


def test_the_entropy_bonus_raises_the_entropy() -> None:
    """Over all tokens of a small vocabulary, weighted by how often each is sampled."""
    logits = torch.tensor([1.0, 0.2, -0.5, 0.0], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    entropy = -(logprobs.exp() * logprobs).sum()
    (raised,) = torch.autograd.grad(entropy, logits, retain_graph=True)

    sampled = tensor([-1.0, -1.5, -1.2, -2.0])  # by another policy
    pack = replace(
        tokens([0.0] * 4, sampled.tolist(), [0.0] * 4),
        current=logprobs,
        weights=sampled.exp(),
        entropy=entropy.detach().expand(4),
    )
    loss, _ = objective(LossSettings(loss="cispo", entropy_bonus=0.3), pack)
    (found,) = torch.autograd.grad(loss, logits)
    assert found.tolist() == pytest.approx((-0.3 * raised).tolist(), rel=1e-5)


def test_the_entropy_bonus_pushes_down_what_is_likelier_than_usual() -> None:
    settings = LossSettings(loss="cispo", entropy_bonus=0.1)
    pack = tokens([-1.0, -3.0, -1.0], [-1.2, -3.0, -9.0], [0.0] * 3, entropy=[2.0, 2.0, 2.0])
    gradient = loss_and_gradient(settings, pack)[1]
    assert gradient == pytest.approx([0.1 * exp(0.2) * 1.0, 0.1 * -1.0, 0.1 * 20 * 1.0])


@pytest.mark.parametrize("trajectories", [None, 3])
@pytest.mark.parametrize("mask", ["none", "geometric", "veto"])
def test_a_pack_without_tokens_adds_nothing(trajectories: int | None, mask: str) -> None:
    settings = LossSettings.model_validate({"sequence_mask": mask})
    pack = tokens([], [], [], trajectories=trajectories)
    loss, statistics = objective(settings, pack)
    loss.backward()
    assert loss.item() == 0.0
    assert statistics.metrics() == {"tokens": 0.0}
