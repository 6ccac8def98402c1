"""Scores whether the response equals the known answer."""

from reward.functions import Score
from steplog.rewards import Trajectory


def exact_match(key: str = "answer", ignore_case: bool = False, strip: bool = True) -> Score:
    """1 if the last response equals metadata[key], else 0.

    metadata[key] may be a list of accepted answers. A trajectory whose metadata lacks the key gets no
    reward.
    """

    def normalize(text: object) -> str:
        plain = text if isinstance(text, str) else str(text)
        plain = plain.strip() if strip else plain
        return plain.casefold() if ignore_case else plain

    def score(trajectory: Trajectory) -> float | None:
        truth = trajectory.metadata.get(key)
        if truth is None:
            return None
        accepted = truth if isinstance(truth, list) else [truth]
        response = normalize(trajectory.text)
        return float(any(response == normalize(answer) for answer in accepted))

    return score
