"""The built-in reward functions, by name.

Each name is a factory: called with parameters, it returns a function of a trajectory. The first line of
its docstring is shown in the help. Modules are imported on first use, since some load heavy libraries.
"""

from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import Any

from steplog.rewards import Reward, Trajectory

Result = float | Reward | None
Score = Callable[[Trajectory], Result]
AsyncScore = Callable[[Trajectory], Coroutine[Any, Any, Result]]
Factory = Callable[..., Score | AsyncScore]

FUNCTIONS = {
    "exact_match": "reward.functions.match",
    "numeric_answer": "reward.functions.numeric",
    "math_answer": "reward.functions.maths",
    "regex": "reward.functions.patterns",
    "answer_format": "reward.functions.patterns",
    "json_schema": "reward.functions.json_schema",
    "length_penalty": "reward.functions.lengths",
    "overlong": "reward.functions.lengths",
    "repetition": "reward.functions.lengths",
    "tool_calls": "reward.functions.tool_calls",
    "unit_tests": "reward.functions.unit_tests",
    "judge": "reward.functions.judge",
    "reward_model": "reward.functions.reward_model",
}


def load(name: str) -> Factory:
    factory: Factory = getattr(import_module(FUNCTIONS[name]), name)
    return factory


def summary(name: str) -> str:
    """The first line of the function's docstring, for the help."""
    return (load(name).__doc__ or "").strip().partition("\n")[0]


async def close() -> None:
    """Closes the HTTP session that asynchronous functions opened on the running loop."""
    from reward.functions.http import close as close_sessions

    await close_sessions()
