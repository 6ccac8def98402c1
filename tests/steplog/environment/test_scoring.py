"""What an author has for scoring: token counts, a judge, and ways to leave rollouts out."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from steplog import Environment, EnvironmentFailed, EnvironmentSettings, Rollout, process
from tests.steplog.environment.environments import say
from tests.steplog.environment.openai_server import running_server
from tests.steplog.environment.recorded_log import lines


class Plain(Environment[int]):
    async def get_next_item(self) -> int:
        return self.index

    async def collect_trajectory(self, _: int, rollout: Rollout) -> float | None:
        await say(rollout, "hello")
        return 1.0


def processed(
    cls: type[Environment[Any]], answers: Sequence[str] = ("four",), **given: Any
) -> list[dict[str, Any]]:
    """The rollouts of all groups, by number. The model gives the answers in turn."""
    said = iter(answers)
    usual = {"groups": 1, "group_size": len(answers), "max_failures": 1, "dir": Path("kept")}
    with running_server(lambda _: next(said, answers[0])) as url:
        chosen = EnvironmentSettings(url=url, **{**usual, **given})
        folder = asyncio.run(process(cls(chosen)))
    found = sorted(lines(folder / "rollouts.jsonl"), key=lambda line: int(line["number"]))
    return [rollout for line in found for rollout in line["rollouts"]]


def test_score_knows_how_many_tokens_each_rollout_has() -> None:
    class Short(Plain):
        """The shortest answer wins."""

        async def score(self, _: int, rollouts: Sequence[Rollout]) -> None:
            shortest = min(rollout.tokens for rollout in rollouts)
            for rollout in rollouts:
                rollout.reward = float(rollout.tokens == shortest)
                rollout.metrics["longest_call"] = rollout.longest_call

    told = processed(Short, ["three", "six"])
    by_length = {rollout["tokens"]: rollout for rollout in told}
    assert {tokens: r["reward"] for tokens, r in by_length.items()} == {5: 0.0, 3: 1.0}
    assert by_length[5]["metrics"]["longest_call"] == 1 + 5, "the prompt has one token"


def test_a_member_is_dropped_and_the_group_goes_on() -> None:
    class Picky(Plain):
        async def score(self, _: int, rollouts: Sequence[Rollout]) -> None:
            for rollout in rollouts:
                if rollout.tokens > 3:
                    rollout.drop("too chatty")

    told = processed(Picky, ["three", "six", "two"])
    found = sorted((r["status"], r["reason"], r["reward"]) for r in told)
    assert found == [
        ("cancelled", "too chatty", None),
        ("completed", None, 1.0),
        ("completed", None, 1.0),
    ]


def test_groups_that_are_dropped_do_not_stop_the_environment() -> None:
    class Curriculum(Plain):
        async def collect_trajectory(self, _: int, rollout: Rollout) -> float:
            await say(rollout, "hello")
            rollout.drop("too easy")
            return 1.0

    told = processed(Curriculum, groups=3)
    assert [(r["status"], r["reward"]) for r in told] == [("cancelled", None)] * 3


def test_a_rollout_that_is_too_long_fails_with_its_length() -> None:
    told = processed(Plain, ["three", "six"], max_token_length=5)
    found = {r["tokens"]: (r["status"], r["reason"]) for r in told}
    assert found == {
        3: ("completed", None),
        5: (
            "failed",
            "a call of it has 6 tokens, prompt and answer together; --max-token-length allows 5",
        ),
    }


def test_a_judge_is_another_model_whose_calls_are_not_part_of_the_rollout() -> None:
    class Judged(Plain):
        async def score(self, _: int, rollouts: Sequence[Rollout]) -> None:
            for rollout in rollouts:
                answer = rollout.conversations()[0][-1]["content"]
                verdict = await self.judge.chat.completions.create(
                    model=self.settings.judge_model,
                    messages=[{"role": "user", "content": f"Is {answer} right?"}],
                )
                rollout.reward = float(verdict.choices[0].message.content or "")

    with running_server(lambda messages: str(int("six" in messages[-1]["content"]))) as judge:
        told = processed(Judged, ["three", "six"], judge_url=judge, judge_model="big")
    rewards = {rollout["tokens"]: rollout["reward"] for rollout in told}
    assert rewards == {5: 0.0, 3: 1.0}
    assert all(len(rollout["conversations"]) == 1 for rollout in told)


def test_a_judge_that_was_not_given_is_named() -> None:
    class Judged(Plain):
        async def score(self, *_: Any) -> None:
            assert self.judge

    with pytest.raises(EnvironmentFailed, match="self.judge needs --judge-url"):
        processed(Judged)
