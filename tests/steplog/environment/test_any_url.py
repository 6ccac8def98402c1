"""`process` and `evaluate` need no gateway and no broker, only something that speaks OpenAI's API."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from steplog import Environment, EnvironmentFailed, EnvironmentSettings, Rollout, evaluate, process
from steplog.environment.backends.recording import Call, conversations
from steplog.environment.records import progress
from tests.steplog.environment.openai_server import running_server
from tests.steplog.environment.recorded_log import lines

SCRIPT = "<script>alert(1)</script>"


class Sums(Environment[tuple[int, int]]):
    """As small as an environment gets."""

    async def get_next_item(self) -> tuple[int, int]:
        return self.random.randrange(100), self.random.randrange(100)

    async def collect_trajectory(self, item: tuple[int, int], rollout: Rollout) -> float | None:
        a, b = item
        question: Any = [{"role": "user", "content": f"{a} + {b} ="}]
        answer = await rollout.client.chat.completions.create(model="any", messages=question)
        return float(answer.choices[0].message.content == str(a + b))


class Held(Sums):
    async def setup(self) -> None:
        self.items = [(n, n) for n in range(5)]

    async def get_next_item(self) -> Any:
        return await Environment.get_next_item(self)

    async def eval_items(self) -> Sequence[tuple[int, int]]:
        return [(1, 2), (3, 4), (50, 50)]


class Streaming(Sums):
    async def collect_trajectory(self, item: tuple[int, int], rollout: Rollout) -> None:
        question: Any = [{"role": "user", "content": f"{item[0]} + {item[1]} ="}]
        stream = await rollout.client.chat.completions.create(
            model="any", messages=question, stream=True
        )
        async for _ in stream:
            pass


def right(messages: list[dict[str, Any]]) -> str:
    a, b = messages[-1]["content"].removesuffix(" =").split(" + ")
    return str(int(a) + int(b))


def settings(url: str | None, **given: Any) -> EnvironmentSettings:
    return EnvironmentSettings(url=url, group_size=2, dir=Path("kept"), **given)


def test_process_writes_groups_and_a_page() -> None:
    with running_server(right) as url:
        folder = asyncio.run(process(Sums(settings(url, groups=5))))
        second = asyncio.run(process(Sums(settings(url, groups=1))))
    kept = lines(folder / "rollouts.jsonl")
    assert sorted(line["number"] for line in kept) == list(range(5))
    rollouts = [rollout for line in kept for rollout in line["rollouts"]]
    assert [rollout["reward"] for rollout in rollouts] == [1.0] * 10
    assert all(rollout["advantage"] == 0 for rollout in rollouts)
    assert (folder / "rollouts.html").read_text().count("<details") == 5 + 10
    assert second != folder, "what was kept stays"


def test_the_same_seed_draws_the_same_items() -> None:
    with running_server(right) as url:
        first = asyncio.run(process(Sums(settings(url, groups=4, seed=3))))
        again = asyncio.run(process(Sums(settings(url, groups=4, seed=3))))
        other = asyncio.run(process(Sums(settings(url, groups=4, seed=4))))

    def items(folder: Path) -> list[Any]:
        found = lines(folder / "rollouts.jsonl")
        return [line["item"] for line in sorted(found, key=lambda line: line["number"])]

    assert items(first) == items(again) != items(other)


def test_a_data_set_is_gone_through_in_every_epoch_in_another_order() -> None:
    async def drawn() -> list[Any]:
        environment = Held(settings(None))
        await environment.setup()
        return [await environment.draw() for _ in range(15)]

    items = asyncio.run(drawn())
    epochs = [items[:5], items[5:10], items[10:]]
    assert all(sorted(epoch) == [(n, n) for n in range(5)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert items == asyncio.run(drawn())


def test_an_evaluation_beside_the_groups_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with running_server(right) as url:
        asyncio.run(process(Held(settings(url, groups=1, eval_every=1))))
    told = capfd.readouterr().err
    assert "1 of 1 groups, " in told and "; evaluation: 3 of 3 items" in told


def test_evaluate_tells_means_and_keeps_samples() -> None:
    with running_server(lambda messages: right(messages).replace("100", "99")) as url:
        told = asyncio.run(evaluate(Held(settings(url, eval_samples=2))))
    assert told.metrics["reward"] == pytest.approx(2 / 3)
    assert told.metrics["usable_share"] == 1
    written = json.loads((told.folder / "metrics.json").read_text())
    assert written["metrics"] == told.metrics and written["items"] == 3
    assert len(lines(told.folder / "samples.jsonl")) == 3


def test_evaluate_sends_its_means_to_trackers() -> None:
    with running_server(right) as url:
        told = asyncio.run(evaluate(Held(settings(url, trackers=("tensorboard",)))))
    (row,) = lines(told.folder / "metrics.jsonl")
    assert row["eval/reward"] == 1.0
    assert list((told.folder / "tensorboard").iterdir())


class Talk(Sums):
    agents = ("buyer", "seller")

    async def collect_trajectory(self, item: tuple[int, int], rollout: Rollout) -> None:
        question: Any = [{"role": "user", "content": f"{item[0]} + {item[1]} ="}]
        for name in ("seller", "buyer", "seller"):
            client = rollout.agent(name).client
            await client.chat.completions.create(model="any", messages=question)


def test_each_conversation_says_whose_it_is() -> None:
    with running_server(right) as url:
        folder = asyncio.run(process(Talk(settings(url, groups=1))))
    (line,) = lines(folder / "rollouts.jsonl")
    assert [r["speakers"] for r in line["rollouts"]] == [["buyer", "seller", "seller"]] * 2
    page = (folder / "rollouts.html").read_text()
    assert page.count("<p class=dim>seller</p>") == 4


def test_a_stream_is_recorded_too() -> None:
    with running_server(right) as url:
        folder = asyncio.run(process(Streaming(settings(url, groups=1))))
    (line,) = lines(folder / "rollouts.jsonl")
    a, b = line["item"]
    for rollout in line["rollouts"]:
        assert rollout["conversations"][0][-1]["content"] == str(a + b)
        assert rollout["tokens"] == len(str(a + b)) and rollout["reward"] is None


def test_what_a_model_writes_stays_text() -> None:
    with running_server(lambda _: SCRIPT) as url:
        folder = asyncio.run(process(Sums(settings(url, groups=1))))
    page = (folder / "rollouts.html").read_text()
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page
    assert "default-src" in page


def test_process_needs_a_url_and_evaluate_needs_items() -> None:
    with pytest.raises(EnvironmentFailed, match="process needs --url"):
        asyncio.run(process(Sums(settings(None))))
    with (
        running_server(right) as url,
        pytest.raises(EnvironmentFailed, match="sums has nothing to evaluate"),
    ):
        asyncio.run(evaluate(Sums(settings(url))))


def test_a_conversation_is_told_once_and_a_rewritten_one_apart() -> None:
    def call(*messages: str) -> Call:
        said = [{"role": "user", "content": text} for text in messages]
        return Call(said, {"role": "assistant", "content": "x"}, "stop", 1, 0.1)

    calls = [call("a"), call("a", "x", "b"), call("z"), call("z", "x", "y")]
    told = [[message["content"] for message in turns] for turns in conversations(calls)]
    assert told == [["a", "x", "b", "x"], ["z", "x", "y", "x"]]
    assert len(conversations([call("a"), call("a")])) == 2, "neither has the other's answer"
