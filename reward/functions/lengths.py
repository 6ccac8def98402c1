"""Penalties for what is long, and for what says the same again."""

from collections.abc import Callable, Sequence

from reward.api import Trajectory
from reward.functions import Score


def length_penalty(max_tokens: int, scale: float = 1.0, of: str = "trajectory") -> Score:
    """0 up to max_tokens, then down in proportion to the excess, to -scale at twice as many.

    `of` says which tokens count, of those that the model sampled: all of the `trajectory`, or those
    of the `last` or of the `longest` response.
    """
    count = _counter(of)
    _positive(max_tokens=max_tokens)

    def score(trajectory: Trajectory) -> float:
        excess = max(0, count(trajectory) - max_tokens)
        return -scale * min(1.0, excess / max_tokens)

    return score


def overlong(max_tokens: int, buffer: int, of: str = "trajectory") -> Score:
    """DAPO's soft punishment: 0 up to max_tokens - buffer, then linear to -1 at max_tokens.

    `of` is the same as for length_penalty.
    """
    count = _counter(of)
    _positive(max_tokens=max_tokens, buffer=buffer)
    if buffer > max_tokens:
        raise ValueError("buffer is a part of max_tokens, and cannot be larger")

    def score(trajectory: Trajectory) -> float:
        excess = max(0, count(trajectory) - (max_tokens - buffer))
        return -min(1.0, excess / buffer)

    return score


def repetition(n: int = 4, scale: float = 1.0) -> Score:
    """-scale times the share of n-grams of tokens that were there before in the same response.

    Responses are looked at one by one, since calls of the same tool are rightly alike.
    """
    _positive(n=n)

    def score(trajectory: Trajectory) -> float:
        counts = [_repeated(step.response_ids, n) for step in trajectory.steps]
        total = sum(total for _, total in counts)
        repeated = sum(repeated for repeated, _ in counts)
        return -scale * repeated / total if total else 0.0

    return score


def _repeated(ids: Sequence[int], n: int) -> tuple[int, int]:
    """How many n-grams repeat an earlier one, and how many there are."""
    total = max(0, len(ids) - n + 1)
    different = set(zip(*(ids[start : start + total] for start in range(n)), strict=True))
    return total - len(different), total


def _lengths(trajectory: Trajectory) -> list[int]:
    return [len(step.response_ids) for step in trajectory.steps] or [0]


def _counter(of: str) -> Callable[[Trajectory], int]:
    counters: dict[str, Callable[[Trajectory], int]] = {
        "trajectory": lambda trajectory: trajectory.response_tokens,
        "last": lambda trajectory: _lengths(trajectory)[-1],
        "longest": lambda trajectory: max(_lengths(trajectory)),
    }
    if of not in counters:
        raise ValueError(f"of is one of {', '.join(counters)}, not {of!r}")
    return counters[of]


def _positive(**given: int) -> None:
    for name, number in given.items():
        if number <= 0:
            raise ValueError(f"{name} must be above 0")
