"""Sampling parameters: which of them leave logprobs that can be trained on.

One rule for captured calls, submitted Steps, groups of Atropos environments and imported files. The
trainer divides logits by the temperature, so it can be any. Parameters that truncate or reshape the
distribution give logprobs that the trainer cannot compute again.
"""

import math
from collections.abc import Mapping
from typing import Any

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "structured_outputs": (),
}
"""Values, besides null, that leave the model's distribution unchanged."""
LOWEST_TEMPERATURE = 0.01
"""vLLM samples at this temperature if a lower one is asked for, except 0, which is greedy decoding."""


def untrainable_reason(sampling: Mapping[str, Any]) -> str | None:
    """Why logprobs sampled with these parameters cannot be trained on; None if they can."""
    temperature = sampling.get("temperature")
    if temperature == 0:
        return "greedy decoding: temperature is 0"
    if temperature is not None and not _is_positive_number(temperature):
        return f"temperature is {temperature!r}, which is not a positive number"
    if temperature is not None and temperature < LOWEST_TEMPERATURE:
        return f"temperature is {temperature}; vLLM samples at {LOWEST_TEMPERATURE} instead"
    changed = [
        name
        for name, neutral in NEUTRAL_VALUES.items()
        if sampling.get(name) is not None and sampling[name] not in neutral
    ]
    return f"the distribution was changed by {', '.join(changed)}" if changed else None


def temperature_of(sampling: Mapping[str, Any]) -> float:
    temperature = sampling.get("temperature")
    return 1.0 if temperature is None else float(temperature)


def _is_positive_number(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf
