"""Whether a response has a certain form."""

import re

from reward.api import Trajectory
from reward.functions import Score

INSIDE = r"(?:(?!</?(?:think|answer)>).)*+"
THINK_THEN_ANSWER = (
    # Chat templates of reasoning models put the first tag into the prompt.
    rf"(?s)\s*(?:<think>)?{INSIDE}</think>\s*<answer>{INSIDE}</answer>\s*"
)


def regex(pattern: str, full: bool = False, value: float = 1.0) -> Score:
    """`value` when the pattern is found in the last response, else 0; `full`: it is all of it.

    Python's regular expressions; flags are written into the pattern, such as `(?is)`.
    """
    compiled = re.compile(pattern)
    look = compiled.fullmatch if full else compiled.search

    def score(trajectory: Trajectory) -> float:
        return value if look(trajectory.text) else 0.0

    return score


def answer_format(pattern: str = THINK_THEN_ANSWER) -> Score:
    """1 when all of the last response fits the pattern, else 0; by default think, then answer tags.

    The default is `<think>…</think> <answer>…</answer>`, each once and nothing after or between;
    the opening `<think>` may be missing, since many chat templates end the prompt with it.
    """
    return regex(pattern, full=True)
