"""What the demo's model is to learn: to find a key by asking around.

    user       Where is the key? Ask ann
    assistant  ask(who="ann")
    tool       I gave it to bob
    assistant  ask(who="bob")
    tool       It is in the barn
    assistant  barn

Who has it and where it lies is drawn anew for every question, so nothing can be known by heart: each
word has to be taken from what was said last. Whoever asks the wrong person has lost.
"""

import random
from dataclasses import dataclass
from typing import Any

PEOPLE = ("ann", "bob", "cleo", "dan", "eva", "finn")
PLACES = ("attic", "barn", "cellar", "drawer", "garage", "hall")
PHRASES = ("Where is the key? Ask ", "I gave it to ", "It is in the ")
TURNS = 3
"""Of the model, when it makes no mistake."""

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
"""A call of the tool as the model writes it, around the name."""


@dataclass(frozen=True)
class Search:
    """One question, and the truth behind it."""

    asked: str
    holder: str
    place: str

    @classmethod
    def draw(cls, chance: random.Random) -> "Search":
        asked, holder = chance.sample(PEOPLE, 2)
        return cls(asked, holder, chance.choice(PLACES))

    @property
    def question(self) -> str:
        return PHRASES[0] + self.asked

    @property
    def words(self) -> tuple[str, str, str]:
        """What the model has to say, turn by turn."""
        return self.asked, self.holder, self.place

    def reply(self, turn: int) -> str:
        """The tool's answer to the right question."""
        return PHRASES[turn + 1] + self.words[turn + 1]


def conversation(search: Search, words: tuple[str, str, str]) -> list[dict[str, Any]]:
    """All of it, as if the model had said these words and was never interrupted."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": search.question}]
    for turn, who in enumerate(words[:2]):
        messages.append({"role": "assistant", "content": "", "tool_calls": [_call(who)]})
        messages.append({"role": "tool", "content": search.reply(turn)})
    return [*messages, {"role": "assistant", "content": words[2]}]


def _call(who: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "ask", "arguments": {"who": who}}}


def score(trajectory: Any) -> float:
    """The reward: the share of turns that were right, up to the first mistake."""
    right = 0
    wanted: list[str] = trajectory.metadata["words"]
    for turn, (step, word) in enumerate(zip(trajectory.steps, wanted, strict=False)):
        if step.text != said(turn, word):
            break
        right += 1
    return right / TURNS


def said(turn: int, word: str) -> str:
    """A turn of the model that says this word in the right form."""
    return word if turn == TURNS - 1 else f"<tool_call>{CALL[0]}{word}{CALL[1]}</tool_call>"
