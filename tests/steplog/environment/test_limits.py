"""Rollouts that reach a limit, of the context or of time, are truncated and stay in their group."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from steplog import Environment, EnvironmentSettings, Rollout, evaluate, process
from tests.steplog.environment.environments import say
from tests.steplog.environment.openai_server import OVERFLOW, Refusal, running_server
from tests.steplog.environment.recorded_log import lines

VLLM = {"code": 400, "message": "This model's maximum context length is 1024 tokens."}


class Talk(Environment[int]):
    """The first rollout of a group says what `words` has, the others only "fine"."""

    words: Sequence[str] = ("hello", "too long")

    async def get_next_item(self) -> int:
        return self.index

    async def collect_trajectories(self, item: int, rollouts: Sequence[Rollout]) -> None:
        first, *others = rollouts
        await asyncio.gather(
            first.run(self.collect_trajectory, item), *(r.run(fine, item) for r in others)
        )

    async def collect_trajectory(self, _: int, rollout: Rollout) -> float | None:
        for word in self.words:
            await say(rollout, word)
        return 1.0


async def fine(_: int, rollout: Rollout) -> float:
    await say(rollout, "fine")
    return 0.5


def answer(messages: list[dict[str, Any]]) -> str:
    said = messages[-1]["content"]
    if said == "too long":
        raise Refusal(400, **OVERFLOW)
    if said == "too long for vLLM":
        raise Refusal(400, **VLLM)
    if said == "too much for the gateway":
        raise Refusal(413, **OVERFLOW)
    if said == "nonsense":
        raise Refusal(400, message="there is no such field")
    if said == "down":
        raise Refusal(503)
    return "well"


def processed(cls: type[Environment[Any]], **given: Any) -> list[dict[str, Any]]:
    """The rollouts of one group."""
    usual = {"groups": 1, "group_size": 2, "max_failures": 1, "dir": Path("kept")}
    with running_server(answer) as url:
        chosen = EnvironmentSettings(url=url, **{**usual, **given})
        folder = asyncio.run(process(cls(chosen)))
    (line,) = lines(folder / "rollouts.jsonl")
    found: list[dict[str, Any]] = line["rollouts"]
    return found


@pytest.mark.parametrize("last", ["too long", "too long for vLLM", "too much for the gateway"])
def test_a_rollout_that_outgrows_the_context_is_truncated(last: str) -> None:
    class Long(Talk):
        words = ("hello", last)

    cut, other = processed(Long)
    assert (cut["status"], cut["reward"]) == ("truncated", 0.0)
    assert cut["reason"].startswith("it outgrew the model's context: ")
    assert (other["status"], other["reward"]) == ("completed", 0.5)
    assert cut["advantage"] < 0 < other["advantage"], "it is compared with the others"


def test_what_it_is_worth_is_a_setting() -> None:
    cut, _ = processed(Talk, truncated_reward=-1)
    assert cut["reward"] == -1.0


def test_an_author_who_meets_the_error_may_reward_what_there_is() -> None:
    class Partial(Talk):
        async def collect_trajectory(self, item: int, rollout: Rollout) -> float | None:
            try:
                return await super().collect_trajectory(item, rollout)
            except openai.BadRequestError:
                return 0.25

    cut, _ = processed(Partial)
    assert (cut["status"], cut["reward"]) == ("truncated", 0.25)


def test_one_that_goes_on_with_less_is_complete() -> None:
    class Shorter(Talk):
        async def collect_trajectory(self, item: int, rollout: Rollout) -> float | None:
            try:
                await super().collect_trajectory(item, rollout)
            except openai.BadRequestError:
                await say(rollout, "in short")
            return 1.0

    done, _ = processed(Shorter)
    assert (done["status"], done["reward"]) == ("completed", 1.0)


@pytest.mark.parametrize("words", [("too long",), ("hello", "nonsense")])
def test_a_task_that_never_fit_and_any_other_refusal_fail(words: Sequence[str]) -> None:
    class Refused(Talk):
        pass

    Refused.words = words
    failed, _ = processed(Refused)
    assert (failed["status"], failed["reward"]) == ("failed", None)


def test_without_rewards_of_its_own_the_environment_leaves_it_to_reward_workers() -> None:
    class Unscored(Talk):
        async def collect_trajectories(self, item: int, rollouts: Sequence[Rollout]) -> None:
            await Environment.collect_trajectories(self, item, rollouts)

    cut, other = processed(Unscored)
    assert [cut["status"], other["status"]] == ["truncated"] * 2
    assert [cut["reward"], other["reward"]] == [None, None]


def test_rewards_that_score_gives_count_as_rewards_of_the_environment() -> None:
    class Scored(Talk):
        async def score(self, _: int, rollouts: Sequence[Rollout]) -> None:
            for rollout in rollouts:
                if rollout.status == "completed":
                    rollout.reward = 3.0

    cut, other = processed(Scored)
    assert (cut["reward"], other["reward"]) == (0.0, 3.0)


class Slow(Talk):
    async def collect_trajectory(self, item: int, rollout: Rollout) -> float | None:
        await super().collect_trajectory(item, rollout)
        await asyncio.sleep(3600)
        return 1.0


def test_a_rollout_that_takes_too_long_is_truncated() -> None:
    class Asleep(Slow):
        words = ("hello",)

    cut, _ = processed(Asleep, rollout_timeout_s=1)
    assert (cut["status"], cut["reward"]) == ("truncated", 0.0)
    assert cut["reason"] == "it took more than 1 s"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "it took more than 1 s"),
        (("hello", "down"), "it took more than 1 s, and was waiting for the model: status 503"),
    ],
)
def test_time_that_was_lost_to_others_is_a_failure(words: Sequence[str], reason: str) -> None:
    """No answer at all, or a server that is down: nothing that the model did."""

    class Waiting(Slow):
        pass

    Waiting.words = words
    failed, _ = processed(Waiting, rollout_timeout_s=1)
    assert (failed["status"], failed["reason"], failed["reward"]) == ("failed", reason, None)


def test_an_evaluation_counts_what_was_cut_off() -> None:
    class Examined(Talk):
        async def eval_items(self) -> range:
            return range(4)

        async def collect_trajectories(self, item: int, rollouts: Sequence[Rollout]) -> None:
            self.words = ("hello", "too long") if item == 2 else ("hello",)
            await Environment.collect_trajectories(self, item, rollouts)

    with running_server(answer) as url:
        settings = EnvironmentSettings(url=url, dir=Path("kept"), workers=1)
        metrics = asyncio.run(evaluate(Examined(settings))).metrics
    assert metrics["reward"] == 0.75, "not the mean of the three that fit"
