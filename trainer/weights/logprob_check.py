"""Checks that an engine computes with the trainer's weights, by comparing log-probs of the same tokens.

The version label of an engine says which weights it was sent; this check shows whether it uses them,
and whether its log-probs are those that it samples from. It needs vLLM servers started with
`--enable-scale-out --logprobs-mode processed_logprobs`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pool.core.logprobs import HIGHEST_LOGPROB
from trainer.weights.engine import EngineCallFailed, EngineControl

TIMEOUT_S = 60.0
TOKENS = 32
TEMPERATURE = 1.5
"""At 1, log-probs before and after the temperature are the same. Above 1, unlikely tokens are sampled
too, and for these the two differ most."""

Logprobs = Callable[[NDArray[np.int32], float], NDArray[np.float32]]
"""Returns, for ids and a temperature, the log-prob of each id given the ids before it."""


class LogprobMismatch(Exception):
    """An engine and the trainer have different weights, or compute log-probs too differently."""


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    url: str
    tokens: int
    mean: float
    """Mean absolute difference of log-probs."""
    max: float
    mean_without_temperature: float
    """The mean if the trainer's log-probs are computed without the temperature."""
    has_logits: bool
    """Whether the engine returned values that no log-prob can have."""

    def check(self, limit: float) -> None:
        """Raises LogprobMismatch if the mean is above the limit. The maximum does not matter: single
        tokens of small probability may differ more."""
        if problem := self._wrong_mode(limit):
            raise LogprobMismatch(
                f"engine {self.url} returns {problem}, but training needs the log-probs that it "
                "samples from: restart it with --logprobs-mode processed_logprobs"
            )
        if not self.mean <= limit:
            raise LogprobMismatch(
                f"log-probs of engine {self.url} and the trainer differ by {self.mean:.2g} on average "
                f"({self.max:.2g} at most, over {self.tokens} tokens; limit {limit:.2g}): "
                f"the engine does not compute with the trainer's weights"
            )

    def _wrong_mode(self, limit: float) -> str | None:
        """What the engine returns instead of log-probs after the temperature, if that is evident."""
        if self.has_logits:
            return "logits"
        if self.mean_without_temperature <= limit and self.mean_without_temperature < self.mean / 2:
            return "log-probs from before the temperature is applied"
        return None


def compare_logprobs(
    url: str,
    prompt: Sequence[int],
    logprobs: Logprobs,
    tokens: int = TOKENS,
    timeout: float = TIMEOUT_S,
) -> LogprobDifference:
    """Lets an engine continue the prompt, and compares its log-probs with the trainer's on the same
    ids."""
    sampled, theirs = _sample(EngineControl(url), prompt, tokens, timeout)
    ids = np.asarray([*prompt, *sampled], dtype=np.int32)

    def differences(temperature: float) -> NDArray[np.float64]:
        ours = np.asarray(logprobs(ids, temperature), dtype=np.float64)[len(prompt) :]
        return np.abs(ours - theirs)

    difference = differences(TEMPERATURE)
    return LogprobDifference(
        url,
        len(sampled),
        mean=float(difference.mean()),
        max=float(difference.max()),
        mean_without_temperature=float(differences(1.0).mean()),
        has_logits=bool(theirs.max() > HIGHEST_LOGPROB),
    )


def _sample(
    engine: EngineControl, prompt: Sequence[int], tokens: int, timeout: float
) -> tuple[list[int], NDArray[np.float64]]:
    """Sampled ids and their log-probs."""
    sampling = {"max_tokens": tokens, "temperature": TEMPERATURE, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": list(prompt), "sampling_params": sampling, "stream": False}
    response = engine.generate(body, timeout)
    try:
        (choice,) = response["choices"]
        ids = [int(each) for each in choice["token_ids"]]
        values = [float(each["logprob"]) for each in choice["logprobs"]["content"]]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineCallFailed(
            engine.url, "generate", f"unexpected response: {error!r}", answered=True
        ) from None
    if not ids or len(ids) != len(values):
        reason = f"the response has {len(values)} log-probs for {len(ids)} tokens"
        raise EngineCallFailed(engine.url, "generate", reason, answered=True)
    return ids, np.asarray(values)
