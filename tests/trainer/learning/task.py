"""What the tiny model is to learn, small enough for a minute: to answer in small letters.

Of its tokens one in ten is a small letter, and so is one in ten that it samples at first. Every token
counts, so every answer says a little about what is better.
"""

from typing import Any

LETTERS = frozenset(range(ord("a"), ord("z") + 1))
"""The ids of the tiny model are bytes."""
QUESTIONS = ("say a word", "say your name", "tell me more", "go on")
TOKENS = 16


def small_letters(trajectory: Any) -> float:
    """The reward: the share of small letters in the last answer, its end of turn included."""
    ids = trajectory.steps[-1].response_ids
    return sum(each in LETTERS for each in ids) / len(ids)
