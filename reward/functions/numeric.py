r"""The number that an answer comes to.

It is looked for in the last `\boxed{}`, else after the last `####`, else it is the last number of
the text. A box without a number in it is an answer that is no number: nothing else is looked at.
"""

import math
import re
from typing import NamedTuple

from reward.api import Reward, RewardFailed, Trajectory
from reward.functions import Score


class Number(NamedTuple):
    value: float
    percent: bool = False


PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
NUMBER = re.compile(
    # A minus after a number or a bracket stands between two numbers. A digit after a letter, an
    # index or a power is part of something else.
    r"(?P<sign>(?<![\w.^)\]])-)?\$?(?<![\w.^])(?<!\^\{)"
    rf"(?:(?P<whole>\d+)\s{{1,2}}(?=\d+\s?/))?(?P<up>{PLAIN})(?:\s?/\s?(?P<down>{PLAIN}))?"
    r"(?P<percent>\s?%)?"
)
REWRITTEN = [
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
    (re.compile(r"(?<=[A-Za-z)}])\s?\^\s?(?:\{[^{}]*\}|[-+]?\d+)"), ""),  # of a unit, of a name
]
EQUALS = re.compile(r"=|≈|\\approx|\\equiv")


def numeric_answer(key: str = "answer", tolerance: float = 1e-6) -> Score:
    r"""1 when the answer is the number in metadata[key], else 0; reads \boxed{}, ####, last number.

    Fractions, powers of ten, thousands separators, currency signs and units are understood. 50% is
    taken for 50 and for 0.5, since data sets write both. The tolerance is absolute and relative.
    metadata[key] may be a number, a list of which any will do, or a whole solution, which is read
    like a response. Without it the function has no opinion.
    """

    def score(trajectory: Trajectory) -> Reward | None:
        truth = trajectory.metadata.get(key)
        if truth is None:
            return None
        accepted = [_true(one, key) for one in (truth if isinstance(truth, list) else [truth])]
        given = find_number(trajectory.text)
        right = given is not None and any(_same(given, one, tolerance) for one in accepted)
        return Reward(float(right), details={"found": given.value if given else None})

    return score


def find_number(text: str) -> Number | None:
    """The number that a response ends up with."""
    boxed = last_boxed(text)
    if boxed is not None:
        return _stated(boxed)
    _, marked, after = text.rpartition("####")
    if marked:
        return _stated(after.strip().partition("\n")[0])
    numbers = [found for match in NUMBER.finditer(_rewritten(text)) if (found := _number(match))]
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{} holds, braces within included; to the end of an unfinished text."""
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


def _stated(answer: str) -> Number | None:
    """The first number, since units come after it; of an equation, the one that it ends with."""
    last = EQUALS.split(answer)[-1]
    matches = NUMBER.finditer(_rewritten(last))
    return next((found for match in matches if (found := _number(match))), None)


def _rewritten(text: str) -> str:
    for pattern, replacement in REWRITTEN:
        text = pattern.sub(replacement, text)
    return text


def _number(match: re.Match[str]) -> Number | None:
    whole, up, down = (_float(match[part]) for part in ("whole", "up", "down"))
    if down == 0:
        return None
    value = (whole or 0.0) + (up or 0.0) / (down or 1.0)
    if not math.isfinite(value):
        return None
    return Number(-value if match["sign"] else value, percent=bool(match["percent"]))


def _float(text: str | None) -> float | None:
    return None if text is None else float(text.replace(",", ""))


def _true(given: object, key: str) -> Number:
    if isinstance(given, int | float):
        return Number(float(given))
    found = find_number(str(given))
    if found is None:
        raise RewardFailed(f"metadata[{key!r}] holds no number: {str(given)[:100]!r}")
    return found


def _same(given: Number, truth: Number, tolerance: float) -> bool:
    pairs = [(given.value, truth.value)]
    if given.percent and not truth.percent:
        pairs.append((given.value / 100, truth.value))
    if truth.percent and not given.percent:
        pairs.append((given.value, truth.value / 100))
    return any(math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) for a, b in pairs)
