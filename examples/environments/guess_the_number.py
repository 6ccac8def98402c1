"""A game of several turns: find a number that only the environment knows, told higher or lower.

The model has to remember what it was told. The sooner it finds the number, the more it gets; the group
is scored together, so that the quickest game of all tries gets a little more.

steplog env examples/environments/guess_the_number.py:GuessTheNumber serve --highest 100
"""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from steplog import Environment, EnvironmentSettings, Rollout


class GameSettings(EnvironmentSettings):
    highest: int = Field(64, ge=2, description="the number is between 1 and this")
    turns: int = Field(7, ge=1, description="guesses that a game may take")


class GuessTheNumber(Environment[int]):
    settings: GameSettings

    async def get_next_item(self) -> int:
        return self.random.randint(1, self.settings.highest)

    async def eval_items(self) -> range:
        return range(1, self.settings.highest + 1, 3)

    async def collect_trajectory(self, item: int, rollout: Rollout) -> float:
        rules = (
            f"I think of a number from 1 to {self.settings.highest}. Guess it; say a number only."
        )
        messages: list[Any] = [{"role": "user", "content": rules}]
        for turn in range(1, self.settings.turns + 1):
            answer = await rollout.client.chat.completions.create(
                model=rollout.model, messages=messages, max_tokens=16
            )
            said = answer.choices[0].message.content or ""
            guess = re.search(r"\d+", said)
            if guess is not None and int(guess.group()) == item:
                rollout.metrics["turns"] = turn
                return 1 - (turn - 1) / self.settings.turns
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": _hint(guess, item)},
            ]
        return 0.0

    async def score(self, item: int, rollouts: Sequence[Rollout]) -> None:
        found = [rollout for rollout in rollouts if rollout.reward]
        for rollout in found:
            quickest = min(other.metrics["turns"] for other in found)
            if rollout.metrics["turns"] == quickest and rollout.reward is not None:
                rollout.reward += 0.1


def _hint(guess: re.Match[str] | None, number: int) -> str:
    if guess is None:
        return "That is no number."
    return "Higher." if int(guess.group()) < number else "Lower."
