"""Answers: as text, as numbers, as mathematics."""

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.functions.match import exact_match
from reward.functions.maths import math_answer
from reward.functions.numeric import Number, find_number, last_boxed, numeric_answer
from steplog.rewards import Reward, RewardFailed
from tests.reward.trajectories import make_trajectory


@pytest.mark.parametrize(
    ("response", "truth", "settings", "value"),
    [
        ("Paris", "Paris", {}, 1.0),
        (" Paris\n", "Paris", {}, 1.0),
        (" Paris", "Paris", {"strip": False}, 0.0),
        ("paris", "Paris", {}, 0.0),
        ("PARIS", "Paris", {"ignore_case": True}, 1.0),
        ("Paris.", "Paris", {}, 0.0),
        ("42", 42, {}, 1.0),
        ("two", ["2", "two"], {}, 1.0),
        ("three", ["2", "two"], {}, 0.0),
    ],
)
def test_exact_match(response: str, truth: Any, settings: Any, value: float) -> None:
    assert exact_match(**settings)(make_trajectory(response, answer=truth)) == value


def test_exact_match_looks_at_the_last_response_only() -> None:
    assert exact_match()(make_trajectory("Paris", "London", answer="Paris")) == 0.0


@pytest.mark.parametrize("factory", [exact_match, numeric_answer, math_answer])
def test_without_a_known_answer_there_is_no_opinion(factory: Any) -> None:
    assert factory()(make_trajectory("42", other=42)) is None
    assert factory(key="truth")(make_trajectory("42", answer=42)) is None


NUMBERS = [
    ("It is 42.", 42),
    ("3 apples and 4 pears make 7 fruits", 7),
    ("-5", -5),
    ("it fell to −5 degrees", -5),
    ("10-5", 5),
    ("- 5 apples", 5),
    ("1,234,567.5", 1234567.5),
    ("the list 1,2,3", 3),
    ("$1,200", 1200),
    ("-$3.50", -3.5),
    (".5", 0.5),
    ("6.02e23", 6.02e23),
    (r"6.02 \times 10^{23}", 6.02e23),
    ("3 x 10^-2", 0.03),
    ("10^6", 1e6),
    ("3/4", 0.75),
    ("2 1/2", 2.5),
    (r"\frac{3}{4}", 0.75),
    (r"-\dfrac{1}{2}", -0.5),
    (r"\frac12", 0.5),
    (r"2\frac{1}{2}", 2.5),
    ("5 m^2", 5),
    (r"5 \text{ cm}^2", 5),
    (r"5\ \mathrm{m/s}^{2}", 5),
    ("x_1 = 7", 7),
    ("H2O", None),
    ("version v1.2", None),
    ("nothing", None),
    ("1/0", None),
    ("1" + "0" * 400, None),
    ("#### 72", 72),
    ("9 then\n#### 72 boxes of 6\nand 5 more", 72),
    ("#### 1\n#### 2", 2),
    (r"\boxed{42}", 42),
    (r"\boxed{1} or \boxed{2}, that is 3 #### 4", 2),
    (r"\boxed{\frac{3}{4}}", 0.75),
    (r"\boxed{x = 5}", 5),
    (r"\boxed{12{,}500}", 12500),
    (r"\boxed{12\,500 \text{ m}^{2}}", 12500),
    (r"\boxed{\$18}", 18),
    (r"\boxed{90^\circ}", 90),
    (r"5, so \boxed{\text{none}}", None),
    (r"cut off: \boxed{17", 17),
]


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_numbers_in_texts(text: str, value: float | None) -> None:
    found = find_number(text)
    assert (found and found.value) == (None if value is None else pytest.approx(value, rel=1e-12))


def test_a_percentage_is_marked() -> None:
    assert find_number("50 %") == Number(50, percent=True)
    assert find_number(r"\boxed{12.5\%}") == Number(12.5, percent=True)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{a{b}{c{d}}} e}", "a{b}{c{d}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{unfinished {", "unfinished {"),
        ("none", None),
    ],
)
def test_boxes_with_braces(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


WRITTEN = ["{}", "{:,}", "The answer is {}.", "so ${:,}", "#### {:,} apples", r"\boxed{{{:,}}}"]


@given(st.integers(-(10**15), 10**15), st.sampled_from(WRITTEN))
def test_any_whole_number_is_read_back(number: int, form: str) -> None:
    found = find_number(form.format(number))
    assert found is not None and found.value == number


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(WRITTEN))
def test_any_number_is_read_back(number: float, form: str) -> None:
    found = find_number(form.replace(",", "").format(number))
    assert found is not None and found.value == number


@given(st.text(alphabet="\\boxed{}frac #$%,.-/ 0123456789e^xé−\n"))
def test_no_text_breaks_the_reader(text: str) -> None:
    find_number(text)


@pytest.mark.parametrize(
    ("response", "truth", "value"),
    [
        ("#### 72", 72, 1.0),
        ("#### 72", "48 + 24 = 72\n#### 72", 1.0),
        ("71", 72, 0.0),
        ("0.3333333", "1/3", 1.0),
        ("0.33", "1/3", 0.0),
        ("50%", 50, 1.0),
        ("50%", 0.5, 1.0),
        ("0.5", "50%", 1.0),
        ("50", "50%", 1.0),
        ("50", 0.5, 0.0),
        ("no idea", 1, 0.0),
        ("3", [2, "3"], 1.0),
    ],
)
def test_numeric_answer(response: str, truth: Any, value: float) -> None:
    reward = numeric_answer()(make_trajectory(response, answer=truth))
    assert isinstance(reward, Reward) and reward.value == value


def test_the_tolerance_can_be_wider() -> None:
    reward = numeric_answer(tolerance=0.01)(make_trajectory("3.14", answer=3.14159))
    assert isinstance(reward, Reward) and reward.value == 1.0


def test_a_true_answer_that_is_no_number_is_a_failure() -> None:
    with pytest.raises(RewardFailed, match="has no number"):
        numeric_answer()(make_trajectory("3", answer="three"))


@pytest.mark.parametrize(
    ("response", "truth", "value"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"The answer is $x^2 + 2x + 1$", "(x+1)^2", 1.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"\boxed{\{3, 1\}}", r"\{1, 3\}", 1.0),
        (r"\boxed{(1, 2]}", r"$(1, 2]$", 1.0),
        (r"\boxed{7}", 7, 1.0),
        (r"\boxed{7}", [6, 7], 1.0),
        (r"\boxed{8}", 7, 0.0),
        ("I do not know", 7, 0.0),
    ],
)
def test_math_answer(response: str, truth: Any, value: float) -> None:
    assert math_answer()(make_trajectory(response, answer=truth)) == value


def test_math_answer_works_in_any_thread() -> None:
    values: list[Any] = []
    score = math_answer()
    trajectory = make_trajectory(r"\boxed{1/2}", answer="0.5")
    thread = threading.Thread(target=lambda: values.append(score(trajectory)))
    thread.start()
    thread.join()
    assert values == [1.0]
