"""Alarms: metrics beyond their limits, as sentences of the form `name: what is wrong; what to do`.

The default limits are a starting point; calibrate them. A metric that was not measured raises no alarm.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class AlarmSettings(BaseModel):
    """The limits beyond which a metric raises an alarm."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    alarm_mismatch: float = Field(
        0.05,
        gt=0,
        description="alarm above this mean difference between the log-probs of trainer and engines, "
        "in nats, over tokens with age 0",
    )
    alarm_ess: float = Field(
        0.5,
        ge=0,
        le=1,
        description="alarm below this effective sample size, as a share of the tokens",
    )
    alarm_masked: float = Field(
        0.2, ge=0, le=1, description="alarm above this share of tokens masked by the loss"
    )
    alarm_prefix_breaks: float = Field(
        0.01,
        ge=0,
        le=1,
        description="alarm above this share of Steps whose prompt does not continue an earlier one",
    )


class AlarmRule(NamedTuple):
    """Raises an alarm when the metric is above the limit, or below it if `below` is set."""

    name: str
    metric: str
    limit: Callable[[AlarmSettings], float]
    sentence: str
    below: bool = False


RULES = (
    AlarmRule(
        "mismatch",
        "logprob_difference_age_0",
        lambda settings: settings.alarm_mismatch,
        "log-probs of engines and trainer differ by {value:.3f} nats per token under the same weights "
        "(limit {limit:g}); check the temperature, the logprobs mode and the weight broadcast",
    ),
    AlarmRule(
        "ess",
        "ess",
        lambda settings: settings.alarm_ess,
        "the effective sample size is {value:.0%} of the tokens (limit {limit:.0%}); the data are too "
        "old, or the engines compute differently",
        below=True,
    ),
    AlarmRule(
        "masked",
        "masked_fraction",
        lambda settings: settings.alarm_masked,
        "the loss masked {value:.0%} of the tokens (limit {limit:.0%}); lower the learning rate or "
        "train on younger data",
    ),
    AlarmRule(
        "prefix_breaks",
        "prefix_break_fraction",
        lambda settings: settings.alarm_prefix_breaks,
        "{value:.1%} of the Steps do not continue an earlier prompt (limit {limit:.1%}); if the "
        "agent only appends messages, check how the chat template renders earlier turns",
    ),
    AlarmRule(
        "skipped_steps",
        "skipped_steps",
        lambda _: 0.0,
        "{value:.0f} optimizer steps were skipped, because their gradient was NaN or infinite; look at "
        "the batch with steplog replay step",
    ),
    AlarmRule(
        "out_of_memory",
        "out_of_memory",
        lambda _: 0.0,
        "{value:.0f} passes ran out of memory and were repeated with smaller packs; lower "
        "tokens_per_pack to save the time",
    ),
    AlarmRule(
        "trained_twice",
        "groups_trained_twice",
        lambda _: 0.0,
        "{value:.0f} groups were trained twice, which the ledger should prevent; report this as a bug",
    ),
)


def find_alarms(metrics: Mapping[str, float], settings: AlarmSettings) -> list[str]:
    """The alarms that the metrics of one step raise."""
    broken = [name for name, value in metrics.items() if not math.isfinite(value)]
    sentences = []
    if broken:
        names = ", ".join(broken)
        sentences.append(f"not_finite: {names} became NaN or infinite; look at the batch")
    for rule in RULES:
        value, limit = metrics.get(rule.metric, math.nan), rule.limit(settings)
        if value < limit if rule.below else value > limit:
            sentences.append(f"{rule.name}: {rule.sentence.format(value=value, limit=limit)}")
    return sentences
