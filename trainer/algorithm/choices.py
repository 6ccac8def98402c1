"""The names of all losses, modes and masks, and the parameters of each with their defaults."""

from collections.abc import Mapping
from typing import Literal

AdvantageMode = Literal["batch_std", "group_std", "none", "loo"]
CreditMode = Literal["outcome", "return_to_go", "per_turn"]
RatioMode = Literal["bypass", "decoupled"]
LossName = Literal["dppo_tv", "ppo_clip", "cispo", "icepop", "kpop", "gspo", "decoupled"]
SequenceMask = Literal["none", "geometric", "opsm", "veto"]
KLEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal[
    "token_mean", "prompt_mean", "rollout_mean", "seq_mean_token_mean", "seq_sum_norm"
]

CLIP = {"e_lo": 0.2, "e_hi": 0.28, "dual_clip": 3.0}
LOSS_DEFAULTS: Mapping[LossName, Mapping[str, float]] = {
    "dppo_tv": {"d_lo": 0.2, "d_hi": 0.2, "ratio_cap": 20.0},
    "ppo_clip": CLIP,
    "cispo": {"e_lo": 1.0, "e_hi": 4.0},
    "icepop": {"band_lo": 0.5, "band_hi": 2.0},
    "kpop": {"kpop_d": 0.1, "ratio_cap": 20.0},
    "gspo": {"e_lo": 3e-4, "e_hi": 4e-4},
    "decoupled": CLIP,
}
"""The parameters that each loss uses; the distance of kpop is the one its authors use."""
RHO_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "tis": {"rho_hi": 2.0},
    "mask": {"rho_lo": 0.5, "rho_hi": 5.0},
}
MASK_DEFAULTS: Mapping[SequenceMask, Mapping[str, float]] = {
    "none": {},
    "geometric": {"sequence_lo": 0.99, "sequence_hi": 1.01},
    "opsm": {},  # published values differ by a factor of 5,000, so opsm_delta has no default
    "veto": {"sequence_lo": 1e-4, "sequence_hi": 100.0},
}
DRIFT_DEFAULTS: Mapping[LossName, float] = {"dppo_tv": 1e-3, "kpop": 1e-3}
"""Weight of the drift term; 0 for all other losses."""
