"""Penalties for long and for repetitive responses."""

from collections.abc import Callable, Sequence

from reward.functions import Score
from steplog.rewards import Trajectory


def length_penalty(max_tokens: int, scale: float = 1.0, of: str = "trajectory") -> Score:
    """0 up to max_tokens, then decreasing with the excess, to -scale at twice as many tokens.

    `of` selects the sampled tokens that count: those of the whole `trajectory`, of the `last` response
    or of the `longest` response.
    """
    count = _counter(of)
    _check_positive(max_tokens=max_tokens)

    def score(trajectory: Trajectory) -> float:
        excess = max(0, count(trajectory) - max_tokens)
        return -scale * min(1.0, excess / max_tokens)

    return score


def overlong(max_tokens: int, buffer: int, of: str = "trajectory") -> Score:
    """DAPO's soft punishment: 0 up to max_tokens - buffer, then linear to -1 at max_tokens.

    `of` is as for length_penalty.
    """
    count = _counter(of)
    _check_positive(max_tokens=max_tokens, buffer=buffer)
    if buffer > max_tokens:
        raise ValueError("buffer cannot be larger than max_tokens")

    def score(trajectory: Trajectory) -> float:
        excess = max(0, count(trajectory) - (max_tokens - buffer))
        return -min(1.0, excess / buffer)

    return score


def repetition(n: int = 4, scale: float = 1.0) -> Score:
    """-scale times the share of token n-grams that repeat an earlier one of the same response.

    Responses are counted separately, since repeated calls of a tool are rightly alike.
    """
    _check_positive(n=n)

    def score(trajectory: Trajectory) -> float:
        counts = [_repeated(step.response_ids, n) for step in trajectory.steps]
        total = sum(total for _, total in counts)
        repeated = sum(repeated for repeated, _ in counts)
        return -scale * repeated / total if total else 0.0

    return score


def _repeated(ids: Sequence[int], n: int) -> tuple[int, int]:
    """The number of n-grams that repeat an earlier one, and the number of all."""
    total = max(0, len(ids) - n + 1)
    distinct = set(zip(*(ids[start : start + total] for start in range(n)), strict=True))
    return total - len(distinct), total


def _lengths(trajectory: Trajectory) -> list[int]:
    return [len(step.response_ids) for step in trajectory.steps] or [0]


def _counter(of: str) -> Callable[[Trajectory], int]:
    counters: dict[str, Callable[[Trajectory], int]] = {
        "trajectory": lambda trajectory: trajectory.response_tokens,
        "last": lambda trajectory: _lengths(trajectory)[-1],
        "longest": lambda trajectory: max(_lengths(trajectory)),
    }
    if of not in counters:
        raise ValueError(f"of must be one of {', '.join(counters)}, not {of!r}")
    return counters[of]


def _check_positive(**parameters: int) -> None:
    for name, number in parameters.items():
        if number <= 0:
            raise ValueError(f"{name} must be above 0")
