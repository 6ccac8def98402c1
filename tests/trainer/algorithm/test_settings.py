from typing import Any

import pytest
from pydantic import ValidationError

from trainer.algorithm.settings import LossSettings
from trainer.algorithm.shaping import shape_reward

DECOUPLED = {"loss": "decoupled", "ratio": "decoupled"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"loss": "decoupled"},
        "loss decoupled needs a proximal policy, and ratio bypass has none; "
        "set ratio to decoupled, or loss to ppo_clip",
    ),
    (
        {"ratio": "decoupled"},
        "loss dppo_tv always compares with the policy that sampled, so ratio decoupled would have no "
        "effect; set ratio to bypass, or loss to decoupled",
    ),
    *(
        (
            {"ratio": "decoupled", "loss": loss},
            f"with ratio decoupled and one optimizer step every ratio is 1, so loss {loss} would "
            "correct nothing; set ratio to bypass, or loss to decoupled",
        )
        for loss in ("ppo_clip", "cispo", "icepop", "gspo")
    ),
    *(
        (
            {"ratio": "decoupled", "loss": "ppo_clip", **more},
            "with ratio decoupled, loss ppo_clip would ignore the log-probs of sampling, and with them "
            "the age of the data; set ratio to bypass, or loss to decoupled",
        )
        for more in ({"optimiser_steps": 4}, {"proximal": "loglinear"})
    ),
    (
        {"e_lo": 0.1},
        "e_lo is a parameter of loss ppo_clip or cispo or gspo or decoupled, and loss dppo_tv does not "
        "use it; remove it",
    ),
    (
        {"loss": "ppo_clip", "d_hi": 0.1},
        "d_hi is a parameter of loss dppo_tv, and loss ppo_clip does not use it; remove it",
    ),
    (
        {"loss": "cispo", "dual_clip": 4},
        "dual_clip is a parameter of loss ppo_clip or decoupled, and loss cispo does not use it; "
        "remove it",
    ),
    (
        {"loss": "ppo_clip", "rho": "tis"},
        "rho is a parameter of loss decoupled, and loss ppo_clip does not use it; remove it",
    ),
    (
        {"proximal": "recompute"},
        "proximal is a parameter of ratio decoupled, and ratio is bypass; remove it",
    ),
    (
        {**DECOUPLED, "rho_lo": 0.4},
        "rho_lo is the lower bound of rho mask; set rho to mask, or remove rho_lo",
    ),
    (
        {**DECOUPLED, "e_hi": 0.3},
        "with one optimizer step the proximal policy is the current one, so e_hi would clip nothing; "
        "remove it, raise optimiser_steps, or set proximal to loglinear",
    ),
    (
        {"loss": "gspo"},
        "loss gspo has one ratio per trajectory, which token_mean would weigh by length; "
        "set aggregation to rollout_mean",
    ),
    (
        {"sequence_lo": 0.9},
        "sequence_lo is a parameter of sequence_mask geometric or veto, and sequence_mask is none; "
        "set sequence_mask to one of them, or remove sequence_lo",
    ),
    (
        {"sequence_mask": "opsm"},
        "sequence_mask opsm needs opsm_delta; choose it from the logged geo_ratio metrics",
    ),
    (
        {"sequence_mask": "veto", "opsm_delta": 0.1},
        "opsm_delta belongs to sequence_mask opsm, and sequence_mask is veto; remove it",
    ),
    (
        {"kl_estimator": "k2"},
        "kl_estimator and kl_off_policy need a reference; set kl_beta above 0, or remove them",
    ),
    (
        {"kl_off_policy": True},
        "kl_estimator and kl_off_policy need a reference; set kl_beta above 0, or remove them",
    ),
    (
        {"kl_beta": 0.01, "kl_estimator": "k1"},
        "the gradient of kl_estimator k1 is 0 on average, so it would only add noise; "
        "set kl_off_policy, or kl_estimator to k2 or k3",
    ),
    (
        {"aggregation": "seq_sum_norm"},
        "aggregation seq_sum_norm divides by a constant length; set l_const",
    ),
    (
        {"l_const": 100},
        "l_const is a parameter of aggregation seq_sum_norm, and aggregation is token_mean; remove it",
    ),
    *(
        (
            given,
            "overlong shaping needs both overlong_max and overlong_buffer; set both or neither",
        )
        for given in ({"overlong_max": 10}, {"overlong_buffer": 10}, {"overlong_lambda": 0.5})
    ),
    (
        {"overlong_max": 10, "overlong_buffer": 11},
        "overlong_buffer is larger than overlong_max; lower it",
    ),
]
TAKEN: list[dict[str, Any]] = [
    {},
    DECOUPLED,
    {**DECOUPLED, "optimiser_steps": 4, "e_lo": 0.1, "rho": "mask", "rho_lo": 0.2, "rho_hi": 9},
    {**DECOUPLED, "proximal": "loglinear", "e_hi": 0.5},
    {"loss": "gspo", "aggregation": "rollout_mean", "optimiser_steps": 2},
    {"loss": "gspo", "aggregation": "seq_mean_token_mean"},
    {"loss": "icepop", "band_lo": 0, "band_hi": 5, "drift_tau": 0.01},
    {"loss": "kpop", "kpop_d": 0.2, "ratio_cap": 5},
    {"loss": "cispo", "sequence_mask": "opsm", "opsm_delta": 0.1},
    {"sequence_mask": "geometric", "sequence_lo": 0.9, "sequence_hi": 1.1},
    {"kl_beta": 0.01, "kl_estimator": "k1", "kl_off_policy": True},
    {"aggregation": "seq_sum_norm", "l_const": 2048, "advantage": "none"},
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED)
def test_what_would_silently_do_nothing_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as error:
        LossSettings.model_validate(given)
    (found,) = error.value.errors()
    assert found["msg"] == f"Value error, {sentence}"


@pytest.mark.parametrize("given", TAKEN)
def test_settings_come_back_from_the_ledger_as_they_were(given: dict[str, Any]) -> None:
    settings = LossSettings.model_validate(given)
    again = LossSettings.model_validate_json(settings.model_dump_json())
    assert again == settings
    assert again.loss_parameters == settings.loss_parameters


@pytest.mark.parametrize(
    "given",
    [
        {"d_hi": 1.0},
        {"d_lo": 0},
        {"ratio_cap": 1},
        {"loss": "ppo_clip", "e_lo": 1.1},
        {"loss": "ppo_clip", "e_hi": 0},
        {"loss": "ppo_clip", "dual_clip": 1},
        {"loss": "icepop", "band_lo": 1},
        {"loss": "icepop", "band_hi": 1},
        {"sequence_mask": "geometric", "sequence_lo": 1.0},
        {"kl_beta": -0.1},
        {"drift_tau": float("nan")},
        {"ratio_cap": float("inf")},
        {"optimiser_steps": 0},
        {"los": "cispo"},
    ],
)
def test_bounds_that_never_or_always_act_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LossSettings.model_validate(given)


def test_a_parameter_has_the_default_of_its_loss() -> None:
    assert LossSettings().loss_parameters == {"d_lo": 0.2, "d_hi": 0.2, "ratio_cap": 20.0}
    cispo = LossSettings(loss="cispo", e_hi=2.0)
    assert cispo.loss_parameters == {"e_lo": 1.0, "e_hi": 2.0}
    assert (LossSettings().tau, cispo.tau) == (1e-3, 0.0)
    veto = LossSettings(sequence_mask="veto", sequence_hi=50)
    assert veto.mask_parameters == {"sequence_lo": 1e-4, "sequence_hi": 50.0}
    masked = LossSettings(loss="decoupled", ratio="decoupled", rho="mask")
    assert masked.rho_parameters == {"rho_lo": 0.5, "rho_hi": 5.0}


def test_what_the_learner_has_to_provide() -> None:
    plain = LossSettings()
    assert not (plain.whole_trajectories or plain.needs_proximal or plain.needs_reference)
    assert LossSettings(loss="gspo", aggregation="rollout_mean").whole_trajectories
    assert LossSettings(sequence_mask="veto").whole_trajectories
    assert LossSettings(kl_beta=0.1).needs_reference
    twice = LossSettings(loss="decoupled", ratio="decoupled", optimiser_steps=2)
    assert twice.needs_proximal
    assert not twice.model_copy(update={"optimiser_steps": 1}).needs_proximal
    assert not twice.model_copy(update={"proximal": "loglinear"}).needs_proximal


def test_every_setting_says_what_it_is() -> None:
    assert all(field.description for field in LossSettings.model_fields.values())


@pytest.mark.parametrize(
    ("generated", "reward"), [(0, 1.0), (80, 1.0), (90, 0.75), (100, 0.5), (110, 0.25)]
)
def test_overlong_shaping(generated: int, reward: float) -> None:
    settings = LossSettings(overlong_max=100, overlong_buffer=20, overlong_lambda=0.5)
    assert shape_reward(settings, 1.0, generated) == pytest.approx(reward)
    assert shape_reward(LossSettings(), 1.0, generated) == 1.0
