"""The answer as it must be, letter by letter."""

from reward.api import Trajectory
from reward.functions import Score


def exact_match(key: str = "answer", ignore_case: bool = False, strip: bool = True) -> Score:
    """1 when the last response is metadata[key], else 0.

    metadata[key] may be a list: any of its items will do. A trajectory whose metadata lacks the key
    has no known answer, and the function no opinion.
    """

    def normal(text: object) -> str:
        plain = text if isinstance(text, str) else str(text)
        plain = plain.strip() if strip else plain
        return plain.casefold() if ignore_case else plain

    def score(trajectory: Trajectory) -> float | None:
        truth = trajectory.metadata.get(key)
        if truth is None:
            return None
        accepted = truth if isinstance(truth, list) else [truth]
        given = normal(trajectory.text)
        return float(any(given == normal(one) for one in accepted))

    return score
