"""What one reward function says about one trajectory: its checked return value, or its failure."""

import math
from typing import Any

import msgspec

from reward.scoring.loading import RewardFunction
from steplog.rewards import Reward, RewardFailed, RewardUnavailable, Trajectory

MAX_DETAILS = 256 * 1024
MAX_FAILURE = 4_000
"""Characters. Details and failures are written into one record together with the trajectory's End, and
a record that is too large could never be written."""


class FunctionResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of one function on one trajectory. Without a value and without a failure the
    function has no opinion."""

    name: str
    version: str
    weight: float
    value: float | None = None
    steps: list[float | None] = []
    """Process rewards of the Steps that functions see, in their order."""
    details: str = "{}"
    failure: str | None = None
    is_outage: bool = False
    """The failure is a RewardUnavailable: worth waiting for, and not the trajectory's fault."""


def result_of(function: RewardFunction, returned: object, trajectory: Trajectory) -> FunctionResult:
    """Raises RewardFailed if the function returned something that is no reward."""
    reward = as_reward(returned)
    if len(reward.steps) not in (0, len(trajectory.steps)):
        raise RewardFailed(
            f"it returned {len(reward.steps)} Step rewards for {len(trajectory.steps)} Steps"
        )
    details = msgspec.json.encode(reward.details).decode() if reward.details else "{}"
    if len(details) > MAX_DETAILS:
        raise RewardFailed(
            f"its details are {len(details)} characters long; the limit is {MAX_DETAILS}"
        )
    return FunctionResult(
        function.name,
        function.version,
        function.weight,
        reward.value,
        [None if step is None else float(step) for step in reward.steps],
        details,
    )


def failure_of(function: RewardFunction, error: Exception | str) -> FunctionResult:
    """The result of a function that raised `error`, or that failed for a reason given as text."""
    text = str(error)
    if isinstance(error, Exception) and not isinstance(error, RewardFailed | RewardUnavailable):
        text = f"{type(error).__name__}: {error}"
    text = text[:MAX_FAILURE].encode(errors="replace").decode()  # lone surrogates are not UTF-8
    return FunctionResult(
        function.name,
        function.version,
        function.weight,
        failure=text,
        is_outage=isinstance(error, RewardUnavailable),
    )


def as_reward(returned: Any) -> Reward:
    """A function may return a number, a Reward, or None for no opinion."""
    reward = returned if isinstance(returned, Reward) else Reward(_optional_float(returned))
    numbers = [reward.value, *reward.steps]
    if any(number is not None and not math.isfinite(_to_float(number)) for number in numbers):
        raise RewardFailed("it returned a number that is not finite")
    return reward


def _optional_float(returned: Any) -> float | None:
    return None if returned is None else _to_float(returned)


def _to_float(returned: Any) -> float:
    # bool counts as a number on purpose: `return answer == truth` is a fine reward.
    try:
        return float(returned)
    except (TypeError, ValueError):
        raise RewardFailed(
            f"it returned {type(returned).__name__}; a reward is a number, a Reward or None"
        ) from None
