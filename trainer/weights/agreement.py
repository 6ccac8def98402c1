"""Do the engines and the trainer have the same model? Their log-probs on the same tokens tell.

Labels say which weights an engine was given; this says whether it uses them. It needs servers with
`--enable-scale-out --logprobs-mode processed_logprobs`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.weights.engine import Engine, EngineFailed

TIMEOUT_S = 60.0
TOKENS = 32


class Disagreement(Exception):
    """An engine and the trainer have different models, or compute them too differently."""


@dataclass(frozen=True, slots=True)
class Agreement:
    url: str
    tokens: int
    mean: float
    """Of the absolute differences of log-probs."""
    max: float

    def demand(self, mean: float) -> None:
        """Raises unless the difference is this small. The mean: single tokens of small probability
        differ more, and mean little."""
        if not self.mean <= mean:
            raise Disagreement(
                f"engine {self.url} and the trainer differ by {self.mean:.2g} per log-prob on average "
                f"({self.max:.2g} at most, {self.tokens} tokens), more than {mean:.2g}: "
                f"the engine does not compute with the trainer's weights"
            )


def compare(
    url: str,
    prompt: Sequence[int],
    logprobs: Callable[[NDArray[np.int32]], NDArray[np.float32]],
    tokens: int = TOKENS,
    limit: float = TIMEOUT_S,
) -> Agreement:
    """Lets an engine sample after the prompt, and asks the trainer about the same ids. `logprobs` gives
    one value per id, that of the id given those before it; the first is not looked at."""
    sampled, engines = sample(Engine(url), prompt, tokens, limit)
    ids = np.asarray([*prompt, *sampled], dtype=np.int32)
    ours = np.asarray(logprobs(ids), dtype=np.float64)[len(prompt) :]
    difference = np.abs(ours - engines)
    return Agreement(url, len(sampled), float(difference.mean()), float(difference.max()))


def sample(
    engine: Engine, prompt: Sequence[int], tokens: int, limit: float
) -> tuple[list[int], NDArray[np.float64]]:
    """Ids and their log-probs."""
    sampling = {"max_tokens": tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": list(prompt), "sampling_params": sampling, "stream": False}
    answer = engine.generate(body, limit)
    try:
        (choice,) = answer["choices"]
        ids = [int(each) for each in choice["token_ids"]]
        values = [float(each["logprob"]) for each in choice["logprobs"]["content"]]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineFailed(
            engine.url, "generate", f"odd answer: {error!r}", answered=True
        ) from None
    if not ids or len(ids) != len(values):
        reason = f"{len(values)} log-probs for {len(ids)} tokens"
        raise EngineFailed(engine.url, "generate", reason, answered=True)
    return ids, np.asarray(values)
