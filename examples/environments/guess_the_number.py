"""A game of several turns: guess a number, with the hints "higher" and "lower".

The model has to remember the hints. The sooner it finds the number, the higher its reward. The group is
scored together, so that its quickest game gets a bonus.

steplog env examples/environments/guess_the_number.py:GuessTheNumber serve --highest 100
"""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from steplog import Environment, EnvironmentSettings, Rollout


class GameSettings(EnvironmentSettings):
    highest: int = Field(64, ge=2, description="the number is between 1 and this one")
    turns: int = Field(7, ge=1, description="largest number of guesses in a game")


class GuessTheNumber(Environment[int]):
    settings: GameSettings

    async def get_next_item(self) -> int:
        return self.random.randint(1, self.settings.highest)

    async def eval_items(self) -> range:
        return range(1, self.settings.highest + 1, 3)

    async def collect_trajectory(self, item: int, rollout: Rollout) -> float:
        rules = (
            f"I am thinking of a number from 1 to {self.settings.highest}. Guess it; reply with a "
            "number only."
        )
        messages: list[Any] = [{"role": "user", "content": rules}]
        for turn in range(1, self.settings.turns + 1):
            answer = await rollout.client.chat.completions.create(
                model=rollout.model, messages=messages, max_tokens=16
            )
            text = answer.choices[0].message.content or ""
            guess = re.search(r"\d+", text)
            if guess is not None and int(guess.group()) == item:
                rollout.metrics["turns"] = turn
                return 1 - (turn - 1) / self.settings.turns
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": _hint(guess, item)},
            ]
        return 0.0

    async def score(self, item: int, rollouts: Sequence[Rollout]) -> None:
        solved = [rollout for rollout in rollouts if rollout.reward]
        for rollout in solved:
            quickest = min(other.metrics["turns"] for other in solved)
            if rollout.metrics["turns"] == quickest and rollout.reward is not None:
                rollout.reward += 0.1


def _hint(guess: re.Match[str] | None, number: int) -> str:
    if guess is None:
        return "That is not a number."
    return "Higher." if int(guess.group()) < number else "Lower."
