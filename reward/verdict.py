"""What a reward function gives back, and how it says that it cannot."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reward:
    """A value with more to it. `steps` are process rewards, one for each Step or None; `details` are
    kept in the record, for people."""

    value: float | None = None
    steps: Sequence[float | None] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


class RewardFailed(Exception):
    """This trajectory cannot be scored, and trying again would not help."""


class RewardUnavailable(Exception):
    """What the function needs is away for now, such as a judge; the trajectory waits for it."""


def as_reward(given: Any) -> Reward:
    """What a function may return: a number, a Reward, or None for no opinion."""
    reward = given if isinstance(given, Reward) else Reward(_number(given))
    numbers = [reward.value, *reward.steps]
    if any(number is not None and not math.isfinite(_checked(number)) for number in numbers):
        raise RewardFailed("it returned a number that is not finite")
    return reward


def _number(given: Any) -> float | None:
    return None if given is None else float(_checked(given))


def _checked(given: Any) -> Any:
    # bool is a number on purpose: `return answer == truth` is a fine reward.
    try:
        return float(given)
    except (TypeError, ValueError):
        raise RewardFailed(
            f"it returned {type(given).__name__}; a reward is a number, a Reward or None"
        ) from None
