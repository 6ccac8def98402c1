"""What an author has for scoring: token counts, a judge, and ways to leave rollouts out."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pool.core.shares import EnvironmentShare, read_share
from schemas.packing import unpack_logprobs
from steplog import Environment, EnvironmentFailed, EnvironmentSettings, Rollout, process, serve
from tests.gateway.running import RunningGateway
from tests.steplog.environment.environments import say
from tests.steplog.environment.openai_server import running_server
from tests.steplog.environment.recorded_log import RecordedLog, lines, prompts


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

    with pytest.raises(EnvironmentFailed, match=r"self\.judge needs --judge-url"):
        processed(Judged)


class Credited(Plain):
    """Every second token is worth something; a second answer as a whole."""

    async def collect_trajectory(self, _: int, rollout: Rollout) -> float:
        question: Any = [{"role": "user", "content": "hello"}]
        first, second = [
            await rollout.client.chat.completions.create(model=rollout.model, messages=question)
            for _ in range(2)
        ]
        assert first.usage is not None
        rollout.set_advantages(first, [n % 2 for n in range(first.usage.completion_tokens)])
        rollout.set_advantages(second, -1.0)
        return 1.0


@pytest.mark.broker
def test_advantages_and_the_share_of_the_environment_go_into_the_log(
    gateway: RunningGateway,
) -> None:
    chosen = EnvironmentSettings(
        gateway=gateway.url,
        dir=Path("kept"),
        jsonl=True,
        group_size=2,
        groups=1,
        weight=2.0,
        min_share=0.25,
    )
    asyncio.run(serve(Credited(chosen)))
    log = RecordedLog(gateway.connection, prompts(Path("kept/rollouts.jsonl")))
    ((_, members),) = log.complete_groups(2).items()
    for member in members:
        first, second = sorted(member.steps, key=lambda step: step.step_index)
        given = {one.step_id: list(unpack_logprobs(one.values)) for one in member.end.advantages}
        tokens = len(first.response_ids) // 4
        assert given == {
            first.step_id: [float(n % 2) for n in range(tokens)],
            second.step_id: [-1.0],
        }
        assert read_share(member.end.metadata) == EnvironmentShare("credited", 2.0, 0.25, True)


def test_advantages_that_do_not_fit_fail_their_rollout() -> None:
    class Miscounted(Plain):
        async def collect_trajectory(self, _: int, rollout: Rollout) -> float:
            question: Any = [{"role": "user", "content": "hello"}]
            answer = await rollout.client.chat.completions.create(model="any", messages=question)
            rollout.set_advantages(answer, [0.5] * 4)
            return 1.0

    told = processed(Miscounted, ["four", "three"])
    found = {rollout["tokens"]: rollout["reason"] for rollout in told}
    assert found == {4: None, 5: "4 advantages were set for an answer of 5 tokens"}


class Streamed(Plain):
    """Only odd items ask for the usage."""

    async def collect_trajectory(self, item: int, rollout: Rollout) -> float:
        options: Any = {"stream_options": {"include_usage": True}} if item % 2 else {}
        question: Any = [{"role": "user", "content": "hello"}]
        stream: Any = await rollout.client.chat.completions.create(
            model=rollout.model, messages=question, stream=True, **options
        )
        async for _ in stream:
            pass
        return 1.0


@pytest.mark.broker
def test_a_streamed_answer_is_counted_or_its_author_is_warned(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = EnvironmentSettings(
        gateway=gateway.url, dir=Path("kept"), jsonl=True, group_size=1, groups=4, workers=1
    )
    asyncio.run(serve(Streamed(chosen)))
    told = [line["rollouts"][0]["tokens"] > 0 for line in lines(Path("kept/rollouts.jsonl"))]
    assert told == [False, True, False, True]
    warnings = [record for record in caplog.messages if "include_usage" in record]
    assert len(warnings) == 1, "once, not per answer"
