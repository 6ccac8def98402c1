"""Which logprobs sampling can produce. Any other number is a mistake and could spoil a batch."""

import numpy as np
from numpy.typing import ArrayLike

HIGHEST_LOGPROB = 1e-4
"""Engines round, so the logprob of a probability of one may be a little above 0."""
LOWEST_LOGPROB = -104.0
"""Samplers draw from probabilities in float32, whose smallest number above 0 is e^-103.3. A token with
a lower logprob has the probability 0 and is never drawn. Engines write -9999 for minus infinity."""


def find_logprob_problem(logprobs: ArrayLike) -> str | None:
    """What is wrong with the logprobs of sampled tokens, as the object of a sentence; None if nothing
    is."""
    values = np.asarray(logprobs, np.float64)
    if not np.isfinite(values).all():
        return "a logprob that is not finite"
    if values.max(initial=LOWEST_LOGPROB) > HIGHEST_LOGPROB:
        return f"a logprob of {values.max():.4g}, which no probability has"
    if values.min(initial=HIGHEST_LOGPROB) < LOWEST_LOGPROB:
        return f"a logprob of {values.min():.4g}, with which no sampler draws a token"
    return None
