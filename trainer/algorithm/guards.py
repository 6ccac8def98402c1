"""Start-up guards: refuse settings that would silently disable a correction, or have no effect.

Each guard returns one sentence that says what is wrong and what to set instead, or None.
"""

from collections.abc import Callable

from trainer.algorithm.choices import LOSS_DEFAULTS
from trainer.algorithm.loss_fields import LossFields

LOSSES_BY_PARAMETER = {
    name: [loss for loss, own in LOSS_DEFAULTS.items() if name in own]
    for name in sorted({name for own in LOSS_DEFAULTS.values() for name in own})
} | {name: ["decoupled"] for name in ("rho", "rho_lo", "rho_hi")}
"""The losses that use each parameter."""

PER_SEQUENCE = ("rollout_mean", "seq_mean_token_mean")


def find_problem(settings: LossFields) -> str | None:
    """The first problem of the settings, as one sentence."""
    return next((problem for guard in GUARDS if (problem := guard(settings))), None)


def _check_ratio(settings: LossFields) -> str | None:
    loss, steps = settings.loss, settings.optimiser_steps
    if loss == "decoupled" and settings.ratio == "bypass":
        return (
            "loss decoupled needs a proximal policy, and ratio bypass has none; "
            "set ratio to decoupled, or loss to ppo_clip"
        )
    if loss == "decoupled" or settings.ratio == "bypass":
        return None
    if loss in ("dppo_tv", "kpop"):
        return (
            f"loss {loss} always compares with the policy that sampled, so ratio decoupled would have "
            "no effect; set ratio to bypass, or loss to decoupled"
        )
    if steps == 1 and settings.proximal != "loglinear":
        return (
            f"with ratio decoupled and one optimizer step every ratio is 1, so loss {loss} would "
            "correct nothing; set ratio to bypass, or loss to decoupled"
        )
    return (
        f"with ratio decoupled, loss {loss} would ignore the log-probs of sampling, and with them the "
        "age of the data; set ratio to bypass, or loss to decoupled"
    )


def _check_parameters(settings: LossFields) -> str | None:
    for name, losses in LOSSES_BY_PARAMETER.items():
        if getattr(settings, name) is not None and settings.loss not in losses:
            return (
                f"{name} is a parameter of loss {' or '.join(losses)}, and loss {settings.loss} does "
                "not use it; remove it"
            )
    if settings.proximal and settings.ratio == "bypass":
        return "proximal is a parameter of ratio decoupled, and ratio is bypass; remove it"
    if settings.rho_lo is not None and settings.rho != "mask":
        return "rho_lo is the lower bound of rho mask; set rho to mask, or remove rho_lo"
    return None


def _check_clip(settings: LossFields) -> str | None:
    clips = [name for name in ("e_lo", "e_hi", "dual_clip") if getattr(settings, name) is not None]
    recomputed = settings.loss == "decoupled" and settings.proximal != "loglinear"
    if recomputed and settings.optimiser_steps == 1 and clips:
        return (
            f"with one optimizer step the proximal policy is the current one, so {clips[0]} would "
            "clip nothing; remove it, raise optimiser_steps, or set proximal to loglinear"
        )
    return None


def _check_gspo(settings: LossFields) -> str | None:
    if settings.loss == "gspo" and settings.aggregation not in PER_SEQUENCE:
        return (
            "loss gspo has one ratio per trajectory, which "
            f"{settings.aggregation} would weigh by length; set aggregation to rollout_mean"
        )
    return None


def _check_sequence_mask(settings: LossFields) -> str | None:
    mask = settings.sequence_mask
    if mask not in ("geometric", "veto"):
        for name in ("sequence_lo", "sequence_hi"):
            if getattr(settings, name) is not None:
                return (
                    f"{name} is a parameter of sequence_mask geometric or veto, and sequence_mask is "
                    f"{mask}; set sequence_mask to one of them, or remove {name}"
                )
    if mask == "opsm" and settings.opsm_delta is None:
        return "sequence_mask opsm needs opsm_delta; choose it from the logged geo_ratio metrics"
    if mask != "opsm" and settings.opsm_delta is not None:
        return f"opsm_delta belongs to sequence_mask opsm, and sequence_mask is {mask}; remove it"
    return None


def _check_kl(settings: LossFields) -> str | None:
    if settings.kl_beta == 0 and (settings.kl_estimator or settings.kl_off_policy):
        return (
            "kl_estimator and kl_off_policy need a reference; set kl_beta above 0, or remove them"
        )
    if settings.kl_estimator == "k1" and not settings.kl_off_policy:
        return (
            "the gradient of kl_estimator k1 is 0 on average, so it would only add noise; "
            "set kl_off_policy, or kl_estimator to k2 or k3"
        )
    return None


def _check_constant(settings: LossFields) -> str | None:
    if settings.aggregation == "seq_sum_norm" and settings.l_const is None:
        return "aggregation seq_sum_norm divides by a constant length; set l_const"
    if settings.aggregation != "seq_sum_norm" and settings.l_const is not None:
        return (
            "l_const is a parameter of aggregation seq_sum_norm, and aggregation is "
            f"{settings.aggregation}; remove it"
        )
    return None


def _check_shaping(settings: LossFields) -> str | None:
    longest, buffer = settings.overlong_max, settings.overlong_buffer
    if (longest is None) != (buffer is None) or (settings.overlong_lambda and longest is None):
        return "overlong shaping needs both overlong_max and overlong_buffer; set both or neither"
    if longest is not None and buffer is not None and buffer > longest:
        return "overlong_buffer is larger than overlong_max; lower it"
    return None


GUARDS: tuple[Callable[[LossFields], str | None], ...] = (
    _check_ratio,
    _check_parameters,
    _check_clip,
    _check_gspo,
    _check_sequence_mask,
    _check_kl,
    _check_constant,
    _check_shaping,
)
