r"""Scores whether the answer is the known number.

The answer is the number in the last `\boxed{}`, else after the last `####`, else the last number of the
text. If the box holds no number, the answer is not a number, and nothing else is searched.
"""

import math
import re
from typing import NamedTuple

from reward.functions import Score
from steplog.rewards import Reward, RewardFailed, Trajectory


class Number(NamedTuple):
    value: float
    percent: bool = False


PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
NUMBER = re.compile(
    # A minus after a number or a bracket is a subtraction, not a sign. A digit after a letter, an index
    # or a power is part of something else.
    r"(?P<sign>(?<![\w.^)\]])-)?\$?(?<![\w.^])(?<!\^\{)"
    rf"(?:(?P<whole>\d+)\s{{1,2}}(?=\d+\s?/))?(?P<up>{PLAIN})(?:\s?/\s?(?P<down>{PLAIN}))?"
    r"(?P<percent>\s?%)?"
)
REWRITES = [
    (re.compile(r"[−–](?=[\d.$\\])"), "-"),
    (re.compile(r"\\[,!;: ]|\\left|\\right|[\u2009\u202f]|~"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"(?<=\d)\s*\\[dtc]?frac"), r" \\frac"),  # a mixed number
    (re.compile(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"\1/\2"),
    (re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)"), r"\1/\2"),
    (re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}"), r" \1"),
    (re.compile(r"(?<=\d)\s?(?:×|\\times|\\cdot|\*|x)\s?10\s?\^\s?\{?([-+]?\d+)\}?"), r"e\1"),
    (re.compile(r"(?<![\w.^])10\s?\^\s?\{?([-+]?\d+)\}?"), r"1e\1"),
    (
        re.compile(r"(?<=[A-Za-z)}])\s?\^\s?(?:\{[^{}]*\}|[-+]?\d+)"),
        "",
    ),  # a power of a unit
]
EQUALS = re.compile(r"=|≈|\\approx|\\equiv")


def numeric_answer(key: str = "answer", tolerance: float = 1e-6) -> Score:
    r"""1 if the answer is the number in metadata[key], else 0; reads \boxed{}, ####, last number.

    It understands fractions, powers of ten, thousands separators, currency signs and units. 50% equals
    both 50 and 0.5, since data sets write both. The tolerance is absolute and relative. metadata[key]
    may be a number, a list of accepted numbers, or a whole solution, which is read like a response.
    Without it the trajectory gets no reward.
    """

    def score(trajectory: Trajectory) -> Reward | None:
        truth = trajectory.metadata.get(key)
        if truth is None:
            return None
        truths = truth if isinstance(truth, list) else [truth]
        accepted = [_true_number(each, key) for each in truths]
        answer = find_number(trajectory.text)
        is_right = answer is not None and any(_is_close(answer, n, tolerance) for n in accepted)
        return Reward(float(is_right), details={"found": answer.value if answer else None})

    return score


def find_number(text: str) -> Number | None:
    """The number that a response gives as its answer."""
    boxed = last_boxed(text)
    if boxed is not None:
        return _first_number(boxed)
    _, marker, after = text.rpartition("####")
    if marker:
        return _first_number(after.strip().partition("\n")[0])
    numbers = [n for match in NUMBER.finditer(_rewrite(text)) if (n := _to_number(match))]
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{}, including inner braces; up to the end if it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : start + brace.start()]
    return text[start:]


def _first_number(answer: str) -> Number | None:
    """The first number, since units come after it; of an equation, the first after the last =."""
    last = EQUALS.split(answer)[-1]
    matches = NUMBER.finditer(_rewrite(last))
    return next((number for match in matches if (number := _to_number(match))), None)


def _rewrite(text: str) -> str:
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _to_number(match: re.Match[str]) -> Number | None:
    whole, up, down = (_float(match[part]) for part in ("whole", "up", "down"))
    if down == 0:
        return None
    value = (whole or 0.0) + (up or 0.0) / (down or 1.0)
    if not math.isfinite(value):
        return None
    return Number(-value if match["sign"] else value, percent=bool(match["percent"]))


def _float(text: str | None) -> float | None:
    return None if text is None else float(text.replace(",", ""))


def _true_number(truth: object, key: str) -> Number:
    if isinstance(truth, int | float):
        return Number(float(truth))
    number = find_number(str(truth))
    if number is None:
        raise RewardFailed(f"metadata[{key!r}] has no number: {str(truth)[:100]!r}")
    return number


def _is_close(answer: Number, truth: Number, tolerance: float) -> bool:
    pairs = [(answer.value, truth.value)]
    if answer.percent and not truth.percent:
        pairs.append((answer.value / 100, truth.value))
    if truth.percent and not answer.percent:
        pairs.append((answer.value, truth.value / 100))
    return any(math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) for a, b in pairs)
