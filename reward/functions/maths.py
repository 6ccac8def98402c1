"""Scores whether the answer is mathematically equal to the known one, however it is written."""

import logging

from reward.functions import Score
from steplog.rewards import RewardFailed, Trajectory


def math_answer(key: str = "answer") -> Score:
    r"""1 if the answer is mathematically equal to metadata[key], else 0; by the math-verify library.

    Understands LaTeX (best inside \boxed{} or $…$) and plain expressions: numbers, fractions, sets,
    intervals, matrices, equations. metadata[key] is a string, a number, or a list of accepted answers;
    without it the trajectory gets no reward.
    """
    from math_verify import parse, verify

    # math-verify warns that its timeouts are off. They need signals, which only the main thread gets;
    # the caller of a reward function limits its time.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def parse_truth(truth: object) -> list[object]:
        text = str(truth)
        # math-verify does not find a bare LaTeX expression; inside a box it does.
        parsed = parse(text, parsing_timeout=None) if "$" in text or "\\boxed" in text else None
        return list(parsed or parse(f"\\boxed{{{text}}}", parsing_timeout=None))

    def score(trajectory: Trajectory) -> float | None:
        truth = trajectory.metadata.get(key)
        if truth is None:
            return None
        truths = truth if isinstance(truth, list) else [truth]
        accepted = [parse_truth(each) for each in truths]
        if not all(accepted):
            raise RewardFailed(f"metadata[{key!r}] cannot be read as mathematics: {truth!r:.100}")
        answer = parse(trajectory.text, parsing_timeout=None)
        # The order of the arguments matters: the true answer is the first.
        return float(any(verify(each, answer, timeout_seconds=None) for each in accepted))

    return score
