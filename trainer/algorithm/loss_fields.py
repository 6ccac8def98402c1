"""The fields of the loss settings: every choice of the loss, its bounds and its default.

A parameter that is left out (None) takes the default of the loss or mask that uses it, so that
settings written to the ledger and read back are the same settings. `settings.py` adds the checks.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainer.algorithm.choices import (
    AdvantageMode,
    Aggregation,
    CreditMode,
    KLEstimator,
    LossName,
    RatioMode,
    SequenceMask,
)

# Values outside of these ranges would never take effect, or always.
Distance = Annotated[float, Field(gt=0, lt=1)]
Width = Annotated[float, Field(ge=0, le=1)]
AboveOne = Annotated[float, Field(gt=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class LossFields(BaseModel):
    """The fields of LossSettings, without its checks."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    advantage: AdvantageMode = Field(
        "batch_std", description="how rewards are turned into advantages"
    )
    credit: CreditMode = Field(
        "outcome",
        description="what a turn's advantage is computed from: the trajectory's reward (outcome), or "
        "also the rewards of Steps: those from the turn on (return_to_go) or its own (per_turn)",
    )
    loss: LossName = Field("dppo_tv", description="loss of a token")
    ratio: RatioMode = Field(
        "bypass",
        description="policy that the loss compares with: the one that sampled (bypass), or a proximal "
        "policy, with its ratio to the one that sampled as a weight (decoupled)",
    )
    proximal: Literal["recompute", "loglinear"] | None = Field(
        None,
        description="proximal policy of ratio decoupled: computed by a forward pass before the first "
        "optimizer step (recompute, the default), or interpolated by age (loglinear)",
    )
    optimiser_steps: Count = Field(1, description="optimizer steps per batch (K)")
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
        description="decoupled: truncate the ratio of the proximal policy to the one that sampled "
        "(tis, the default), or mask tokens whose ratio lies outside of bounds (mask)",
    )
    rho_lo: BelowOne | None = Field(None, description="rho mask: lower bound (default 0.5)")
    rho_hi: AboveOne | None = Field(
        None, description="rho: largest weight (tis, default 2) or upper bound (mask, default 5)"
    )
    drift_tau: NotNegative | None = Field(
        None,
        description="weight of the squared log-ratio of the policy to the one that sampled, on every "
        "token (default 1e-3 for dppo_tv and kpop, else 0)",
    )
    sequence_mask: SequenceMask = Field(
        "none", description="rule that leaves whole trajectories out of the policy gradient"
    )
    sequence_lo: BelowOne | None = Field(
        None,
        description="lower bound of the mean ratio (geometric, default 0.99) or of every token's ratio "
        "(veto, default 1e-4)",
    )
    sequence_hi: AboveOne | None = Field(
        None, description="upper bound of these ratios (geometric, default 1.01; veto, default 100)"
    )
    opsm_delta: Positive | None = Field(
        None,
        description="opsm: leave out a trajectory with a negative advantage whose mean log-ratio is "
        "below minus this value; choose it from the logged geo_ratio metrics",
    )
    kl_beta: NotNegative = Field(
        0.0, description="weight of the KL divergence from a reference model; 0 loads none"
    )
    kl_estimator: KLEstimator | None = Field(
        None, description="estimator of the KL divergence from the reference (default k3)"
    )
    kl_off_policy: bool = Field(
        False,
        description="weight this KL by the ratio to the policy that sampled, which makes it unbiased",
    )
    entropy_bonus: NotNegative = Field(0.0, description="weight of an entropy bonus")
    aggregation: Aggregation = Field(
        "token_mean", description="how the losses of tokens are combined into the loss of a batch"
    )
    l_const: Count | None = Field(
        None, description="seq_sum_norm: constant length that every trajectory is divided by"
    )
    overlong_max: Count | None = Field(
        None,
        description="largest number of generated tokens (L_max); trajectories close to it get a lower "
        "reward",
    )
    overlong_buffer: Count | None = Field(
        None,
        description="number of tokens before overlong_max from which on rewards are lowered (L_buf)",
    )
    overlong_lambda: Positive | None = Field(
        None,
        description="by how much the reward is lowered at overlong_max tokens (default 1)",
    )
    mask_truncated: bool = Field(
        False,
        description="do not train truncated trajectories; their rewards still count in the baseline",
    )
