"""Penalties by length and repetition."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.functions.lengths import length_penalty, overlong, repetition
from tests.reward.trajectories import make_trajectory


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0.0), (100, 0.0), (125, -0.25), (200, -1.0), (1_000, -1.0)]
)
def test_length_penalty(tokens: int, value: float) -> None:
    assert length_penalty(100)(make_trajectory("x" * tokens)) == value
    assert length_penalty(100, scale=0.5)(make_trajectory("x" * tokens)) == value / 2


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (101, -1.0), (500, -1.0)]
)
def test_overlong_is_the_soft_punishment_of_dapo(tokens: int, value: float) -> None:
    assert overlong(100, buffer=20)(make_trajectory("x" * tokens)) == value


@pytest.mark.parametrize(("of", "value"), [("trajectory", -0.9), ("last", 0.0), ("longest", -0.3)])
def test_which_tokens_count(of: str, value: float) -> None:
    trajectory = make_trajectory("x" * 130, "x" * 60)
    assert length_penalty(100, of=of)(trajectory) == pytest.approx(value)


@pytest.mark.parametrize(
    ("responses", "share"),
    [
        (["abcdefgh"], 0.0),
        (["abc"], 0.0),
        ([""], 0.0),
        (["aaaaaaa"], 3 / 4),
        (["abcdabcd"], 1 / 5),
        (["abcdef", "abcdef"], 0.0),  # the same again, but in another call
        (["aaaaaaa", "abcdefg"], 3 / 8),
    ],
)
def test_repetition(responses: list[str], share: float) -> None:
    assert repetition(4)(make_trajectory(*responses)) == -share
    assert repetition(4, scale=2.0)(make_trajectory(*responses)) == -2 * share


@given(st.text("ab", max_size=40), st.integers(1, 6))
def test_repetition_counts_what_was_there_before(text: str, n: int) -> None:
    grams = [text[i : i + n] for i in range(len(text) - n + 1)]
    again = sum(gram in grams[:i] for i, gram in enumerate(grams))
    assert repetition(n)(make_trajectory(text)) == -(again / len(grams) if grams else 0.0)


def test_without_steps_there_is_nothing_to_punish() -> None:
    for score in (length_penalty(1), overlong(2, 1, of="longest"), repetition()):
        assert score(make_trajectory()) == 0.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: length_penalty(0),
        lambda: length_penalty(1, of="first"),
        lambda: overlong(100, buffer=0),
        lambda: overlong(100, buffer=200),
        lambda: repetition(0),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"must|cannot|one of"):
        make()
