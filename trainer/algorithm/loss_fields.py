"""The fields of the loss settings: every choice of the loss, its bounds and its default.

A parameter that is left out (None) takes the default of the loss or mask that uses it, so that
settings written to the ledger and read back are the same settings. `settings.py` adds the checks.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainer.algorithm.choices import (
    AdvantageMode,
    Aggregation,
    KLEstimator,
    LossName,
    RatioMode,
    SequenceMask,
)

# A distance of 1 or more, a lower bound below 0 and a cap below 1 would never or always act.
Distance = Annotated[float, Field(gt=0, lt=1)]
Width = Annotated[float, Field(ge=0, le=1)]
AboveOne = Annotated[float, Field(gt=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class LossFields(BaseModel):
    """Everything between the tokens of a batch and the number that is minimised."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    advantage: AdvantageMode = Field("batch_std", description="how rewards become advantages")
    loss: LossName = Field("dppo_tv", description="loss of a token")
    ratio: RatioMode = Field(
        "bypass",
        description="what the loss compares the policy with: the log-probs of sampling (bypass), or "
        "a proximal policy, with the way from sampling to it as a weight (decoupled)",
    )
    proximal: Literal["recompute", "loglinear"] | None = Field(
        None,
        description="proximal policy of ratio decoupled: a forward pass before the first optimiser "
        "step (recompute, the default), or between sampling and now by age (loglinear)",
    )
    optimiser_steps: Count = Field(1, description="optimiser steps per batch (K)")
    d_lo: Distance | None = Field(
        None, description="dppo_tv: how far a token's probability may fall (default 0.2)"
    )
    d_hi: Distance | None = Field(
        None, description="dppo_tv: how far a token's probability may rise (default 0.2)"
    )
    ratio_cap: AboveOne | None = Field(
        None, description="dppo_tv, kpop: largest weight of a token (C, default 20)"
    )
    e_lo: Width | None = Field(
        None,
        description="how far the ratio may fall below 1: ppo_clip and decoupled 0.2, cispo 1, "
        "gspo 3e-4",
    )
    e_hi: Positive | None = Field(
        None,
        description="how far the ratio may rise above 1: ppo_clip and decoupled 0.28, cispo 4, "
        "gspo 4e-4",
    )
    dual_clip: AboveOne | None = Field(
        None,
        description="ppo_clip, decoupled: largest ratio for negative advantages (k, default 3)",
    )
    band_lo: BelowOne | None = Field(
        None, description="icepop: a token with a smaller ratio is masked (default 0.5)"
    )
    band_hi: AboveOne | None = Field(
        None, description="icepop: a token with a larger ratio is masked (default 2)"
    )
    kpop_d: Positive | None = Field(
        None, description="kpop: a token with a larger binary KL is masked (default 0.1)"
    )
    rho: Literal["tis", "mask"] | None = Field(
        None,
        description="decoupled: the ratio of the proximal policy to sampling is cut off (tis, the "
        "default), or masks what lies outside of its bounds (mask)",
    )
    rho_lo: BelowOne | None = Field(None, description="rho mask: lower bound (default 0.5)")
    rho_hi: AboveOne | None = Field(
        None, description="rho: largest weight (tis, default 2) or upper bound (mask, default 5)"
    )
    drift_tau: NotNegative | None = Field(
        None,
        description="weight of the squared log-ratio to sampling on every token (default 1e-3 for "
        "dppo_tv and kpop, else 0)",
    )
    sequence_mask: SequenceMask = Field(
        "none", description="which whole trajectories are left out of the policy's gradient"
    )
    sequence_lo: BelowOne | None = Field(
        None,
        description="lower bound: of the mean ratio (geometric, default 0.99) or of every token's "
        "ratio (veto, default 1e-4)",
    )
    sequence_hi: AboveOne | None = Field(
        None, description="upper bound (geometric, default 1.01; veto, default 100)"
    )
    opsm_delta: Positive | None = Field(
        None,
        description="opsm: a trajectory with a negative advantage is left out when its mean "
        "log-ratio lies further below 0; set it from the logged geo_ratio",
    )
    kl_beta: NotNegative = Field(
        0.0, description="weight of the KL to a reference model; 0 loads none"
    )
    kl_estimator: KLEstimator | None = Field(
        None, description="estimator of the KL to the reference (default k3)"
    )
    kl_off_policy: bool = Field(
        False, description="weight the KL by the ratio to sampling, which makes it unbiased"
    )
    entropy_bonus: NotNegative = Field(0.0, description="weight of the entropy, which is raised")
    aggregation: Aggregation = Field(
        "token_mean", description="how the losses of tokens become the loss of a batch"
    )
    l_const: Count | None = Field(
        None, description="seq_sum_norm: the length that every trajectory is divided by"
    )
    overlong_max: Count | None = Field(
        None,
        description="generated tokens that a trajectory may have (L_max); rewards of trajectories "
        "close to it are lowered",
    )
    overlong_buffer: Count | None = Field(
        None, description="how many tokens before overlong_max the lowering begins (L_buf)"
    )
    overlong_lambda: Positive | None = Field(
        None, description="what a trajectory of overlong_max tokens loses (default 1)"
    )
    mask_truncated: bool = Field(
        False,
        description="do not train truncated trajectories; their rewards stay in the baseline",
    )
