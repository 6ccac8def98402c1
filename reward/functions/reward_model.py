"""A discriminative reward model: one number for a conversation."""

from typing import Any

from reward.api import RewardFailed, Trajectory
from reward.functions import AsyncScore
from reward.functions.http import ask, with_key
from reward.functions.template import fill


def reward_model(
    url: str,
    model: str,
    route: str = "classify",
    prompt: str = "{prompt}",
    response: str = "{response}",
    text: str = "",
    label: int = 0,
    raw: bool = False,
    api_key_env: str = "",
) -> AsyncScore:
    """The score of a reward model behind vLLM's /classify or /pooling route.

    `url` is the server's, without a path. The model is shown a conversation of `prompt` and
    `response`, by its own chat template; or, where `text` is given, that text as it is. All three
    are templates with places for {prompt}, {response}, {transcript} and {metadata[key]}. `label` is
    the number of the class whose score counts. `raw` asks for scores before the activation function,
    which else brings them between 0 and 1. A model that scores every token counts with its last.
    """
    if route not in ("classify", "pooling"):
        raise ValueError(f"route is classify or pooling, not {route!r}")
    address = f"{url.rstrip('/').removesuffix('/v1')}/{route}"
    headers = with_key(api_key_env)

    def shown(trajectory: Trajectory) -> dict[str, Any]:
        if text:
            return {"input": fill(text, trajectory)}
        user = {"role": "user", "content": fill(prompt, trajectory)}
        return {"messages": [user, {"role": "assistant", "content": fill(response, trajectory)}]}

    async def score(trajectory: Trajectory) -> float:
        question = {"model": model, **shown(trajectory)}
        if raw:
            question["use_activation"] = False
        return read_answer(await ask(address, question, headers), label)

    return score


def read_answer(answer: Any, label: int) -> float:
    try:
        [item] = answer["data"]
        scores = item["probs"] if "probs" in item else item["data"]
        if isinstance(scores[0], list):
            scores = scores[-1]
        return float(scores[label])
    except (KeyError, IndexError, TypeError, ValueError):
        shown = str(answer)[:200]
        raise RewardFailed(f"the reward model's answer holds no score {label}: {shown}") from None
