"""Scores with a discriminative reward model: one number for a conversation."""

from typing import Any

from reward.functions import AsyncScore
from reward.functions.http import key_headers, post_json
from reward.functions.template import fill
from steplog.rewards import RewardFailed, Trajectory


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

    `url` is the server's URL without a path. The model gets a conversation of `prompt` and `response`
    through its own chat template or, if `text` is given, that text as it is. All three are templates in
    which {prompt}, {response}, {transcript} and {metadata[key]} are replaced. `label` is the index of
    the class whose score counts. `raw` requests scores before the activation function, which otherwise
    maps them to 0 to 1. Of a model that scores every token, the last score counts.
    """
    if route not in ("classify", "pooling"):
        raise ValueError(f"route is classify or pooling, not {route!r}")
    address = f"{url.rstrip('/').removesuffix('/v1')}/{route}"
    headers = key_headers(api_key_env)

    def model_input(trajectory: Trajectory) -> dict[str, Any]:
        if text:
            return {"input": fill(text, trajectory)}
        user = {"role": "user", "content": fill(prompt, trajectory)}
        return {"messages": [user, {"role": "assistant", "content": fill(response, trajectory)}]}

    async def score(trajectory: Trajectory) -> float:
        request = {"model": model, **model_input(trajectory)}
        if raw:
            request["use_activation"] = False
        return read_answer(await post_json(address, request, headers), label)

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
        raise RewardFailed(f"the reward model's answer has no score {label}: {shown}") from None
