"""Checks that an engine computes with the trainer's weights, by comparing log-probs of the same tokens.

The version label of an engine says which weights it was sent; this check shows whether it uses them. It
needs vLLM servers started with `--enable-scale-out --logprobs-mode processed_logprobs`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.weights.engine import EngineCallFailed, EngineControl

TIMEOUT_S = 60.0
TOKENS = 32


class LogprobMismatch(Exception):
    """An engine and the trainer have different weights, or compute log-probs too differently."""


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    url: str
    tokens: int
    mean: float
    """Mean absolute difference of log-probs."""
    max: float

    def check(self, limit: float) -> None:
        """Raises LogprobMismatch if the mean is above the limit. The maximum does not matter: single
        tokens of small probability may differ more."""
        if not self.mean <= limit:
            raise LogprobMismatch(
                f"log-probs of engine {self.url} and the trainer differ by {self.mean:.2g} on average "
                f"({self.max:.2g} at most, over {self.tokens} tokens; limit {limit:.2g}): "
                f"the engine does not compute with the trainer's weights"
            )


def compare_logprobs(
    url: str,
    prompt: Sequence[int],
    logprobs: Callable[[NDArray[np.int32]], NDArray[np.float32]],
    tokens: int = TOKENS,
    timeout: float = TIMEOUT_S,
) -> LogprobDifference:
    """Lets an engine continue the prompt, and compares its log-probs with the trainer's on the same
    ids. `logprobs` returns one value per id, given the ids before it; the first is ignored."""
    sampled, theirs = _sample(EngineControl(url), prompt, tokens, timeout)
    ids = np.asarray([*prompt, *sampled], dtype=np.int32)
    ours = np.asarray(logprobs(ids), dtype=np.float64)[len(prompt) :]
    difference = np.abs(ours - theirs)
    return LogprobDifference(url, len(sampled), float(difference.mean()), float(difference.max()))


def _sample(
    engine: EngineControl, prompt: Sequence[int], tokens: int, timeout: float
) -> tuple[list[int], NDArray[np.float64]]:
    """Sampled ids and their log-probs."""
    sampling = {"max_tokens": tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
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
