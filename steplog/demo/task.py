"""The demo's task: find a key by asking people.

    user       Where is the key? Ask ann
    assistant  ask(who="ann")
    tool       I gave it to bob
    assistant  ask(who="bob")
    tool       It is in the barn
    assistant  barn

People and places are drawn at random for every question, so nothing can be memorized: each word has
to be taken from the last message. Asking the wrong person ends the conversation.
"""

import random
from dataclasses import dataclass
from typing import Any

PEOPLE = ("ann", "bob", "cleo", "dan", "eva", "finn")
PLACES = ("attic", "barn", "cellar", "drawer", "garage", "hall")
PHRASES = ("Where is the key? Ask ", "I gave it to ", "It is in the ")
TURNS = 3
"""Turns of the model if it makes no mistake."""

ASK: Any = {
    "type": "function",
    "function": {
        "name": "ask",
        "description": "Asks somebody for the key",
        "parameters": {
            "type": "object",
            "properties": {"who": {"type": "string"}},
            "required": ["who"],
        },
    },
}
CALL = ('{"name": "ask", "arguments": {"who": "', '"}}')
"""What the model writes before and after the name in a tool call."""


@dataclass(frozen=True)
class Search:
    """One question and its solution."""

    asked: str
    holder: str
    place: str

    @classmethod
    def draw(cls, rng: random.Random) -> "Search":
        asked, holder = rng.sample(PEOPLE, 2)
        return cls(asked, holder, rng.choice(PLACES))

    @property
    def question(self) -> str:
        return PHRASES[0] + self.asked

    @property
    def words(self) -> tuple[str, str, str]:
        """The right word of each turn of the model."""
        return self.asked, self.holder, self.place

    def reply(self, turn: int) -> str:
        """The tool's answer to the right question."""
        return PHRASES[turn + 1] + self.words[turn + 1]


def conversation(search: Search, words: tuple[str, str, str]) -> list[dict[str, Any]]:
    """The whole conversation in which the model says these words, without ending at a mistake."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": search.question}]
    for turn, who in enumerate(words[:2]):
        messages.append({"role": "assistant", "content": "", "tool_calls": [_call(who)]})
        messages.append({"role": "tool", "content": search.reply(turn)})
    return [*messages, {"role": "assistant", "content": words[2]}]


def _call(who: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "ask", "arguments": {"who": who}}}


def score(trajectory: Any) -> float:
    """The reward: the share of right turns before the first mistake."""
    right = 0
    words: list[str] = trajectory.metadata["words"]
    for turn, (step, word) in enumerate(zip(trajectory.steps, words, strict=False)):
        if step.text != format_turn(turn, word):
            break
        right += 1
    return right / TURNS


def format_turn(turn: int, word: str) -> str:
    """The text of a turn of the model with this word: a tool call, or the final answer."""
    return word if turn == TURNS - 1 else f"<tool_call>{CALL[0]}{word}{CALL[1]}</tool_call>"
