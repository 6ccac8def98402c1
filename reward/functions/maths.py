"""Answers that are equal as mathematics, however they are written."""

import logging

from reward.api import RewardFailed, Trajectory
from reward.functions import Score


def math_answer(key: str = "answer") -> Score:
    r"""1 when the answer equals metadata[key] as mathematics, else 0; by the math-verify library.

    Understands LaTeX (best inside \boxed{} or $…$) and plain expressions: numbers, fractions, sets,
    intervals, matrices, equations. metadata[key] is a string, a number, or a list of which any will
    do; without it the function has no opinion.
    """
    from math_verify import parse, verify

    # It warns of the time-outs that are off: they need signals, which only the main thread gets.
    # Whoever calls a reward function limits its time.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def read(truth: object) -> list[object]:
        text = str(truth)
        # A bare LaTeX expression is not found; inside of a box it is.
        found = parse(text, parsing_timeout=None) if "$" in text or "\\boxed" in text else None
        return list(found or parse(f"\\boxed{{{text}}}", parsing_timeout=None))

    def score(trajectory: Trajectory) -> float | None:
        truth = trajectory.metadata.get(key)
        if truth is None:
            return None
        accepted = [read(one) for one in (truth if isinstance(truth, list) else [truth])]
        if not all(accepted):
            raise RewardFailed(f"metadata[{key!r}] cannot be read as mathematics: {truth!r:.100}")
        given = parse(trajectory.text, parsing_timeout=None)
        # The order matters: the true answer is the first.
        return float(any(verify(one, given, timeout_seconds=None) for one in accepted))

    return score
