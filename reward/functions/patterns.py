"""Scores whether the response matches a pattern."""

import re

from reward.functions import Score
from steplog.rewards import Trajectory

INSIDE = r"(?:(?!</?(?:think|answer)>).)*+"
THINK_THEN_ANSWER = (
    # Chat templates of reasoning models put the first tag into the prompt.
    rf"(?s)\s*(?:<think>)?{INSIDE}</think>\s*<answer>{INSIDE}</answer>\s*"
)


def regex(pattern: str, full: bool = False, value: float = 1.0) -> Score:
    """`value` if the pattern is found in the last response, else 0.

    With `full` the pattern must match the whole response. It is a Python regular expression; write
    flags into the pattern, such as `(?is)`.
    """
    compiled = re.compile(pattern)
    find = compiled.fullmatch if full else compiled.search

    def score(trajectory: Trajectory) -> float:
        return value if find(trajectory.text) else 0.0

    return score


def answer_format(pattern: str = THINK_THEN_ANSWER) -> Score:
    """1 if the whole last response matches the pattern, else 0; by default think, then answer tags.

    The default is `<think>…</think> <answer>…</answer>`, each once, with nothing after or
    between. The opening `<think>` may be missing, since many chat templates end the prompt with it.
    """
    return regex(pattern, full=True)
