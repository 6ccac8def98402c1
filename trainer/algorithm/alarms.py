"""Metrics that mean trouble, as sentences for a person: the alarm's name, a colon, and what to do.

The limits are a start; calibrate them. A metric that was not measured raises nothing.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class AlarmSettings(BaseModel):
    """From where on a metric is an alarm."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    alarm_mismatch: float = Field(
        0.05,
        gt=0,
        description="alarm: mean |c - b|, in nats, of tokens that the present version sampled",
    )
    alarm_ess: float = Field(
        0.5, ge=0, le=1, description="alarm: effective share of the sample below it"
    )
    alarm_masked: float = Field(
        0.2, ge=0, le=1, description="alarm: share of tokens that the loss masked"
    )
    alarm_prefix_breaks: float = Field(
        0.01,
        ge=0,
        le=1,
        description="alarm: share of Steps whose prompt does not continue an earlier one",
    )


class Rule(NamedTuple):
    """Raised above the limit, or below it where that is the bad side."""

    name: str
    metric: str
    limit: Callable[[AlarmSettings], float]
    sentence: str
    below: bool = False


RULES = (
    Rule(
        "mismatch",
        "logprob_difference_age_0",
        lambda settings: settings.alarm_mismatch,
        "engines and trainer differ by {value:.3f} nats per token under the same weights (limit "
        "{limit:g}); look at the temperature, the logprobs mode and the weight broadcast",
    ),
    Rule(
        "ess",
        "ess",
        lambda settings: settings.alarm_ess,
        "the batch counts like {value:.0%} of its tokens (limit {limit:.0%}); its data are too old, "
        "or the engines differ",
        below=True,
    ),
    Rule(
        "masked",
        "masked_fraction",
        lambda settings: settings.alarm_masked,
        "the loss masked {value:.0%} of the tokens (limit {limit:.0%}); lower the learning rate or "
        "the age of the data",
    ),
    Rule(
        "prefix_breaks",
        "prefix_break_fraction",
        lambda settings: settings.alarm_prefix_breaks,
        "{value:.1%} of the Steps do not continue an earlier prompt (limit {limit:.1%}); if the "
        "agent only appends, look at how the chat template renders earlier turns",
    ),
    Rule(
        "trained_twice",
        "groups_trained_twice",
        lambda _: 0.0,
        "{value:.0f} groups were trained twice, which the ledger should make impossible",
    ),
)


def find_alarms(metrics: Mapping[str, float], settings: AlarmSettings) -> list[str]:
    """What to tell a person about one step."""
    broken = [name for name, value in metrics.items() if not math.isfinite(value)]
    found = (
        [f"not_finite: {', '.join(broken)} broke down; go back to a checkpoint"] if broken else []
    )
    for rule in RULES:
        value, limit = metrics.get(rule.metric, math.nan), rule.limit(settings)
        if value < limit if rule.below else value > limit:
            found.append(f"{rule.name}: {rule.sentence.format(value=value, limit=limit)}")
    return found
