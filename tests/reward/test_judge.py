"""Judges and reward models: questions, answers, and faults."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from reward.functions import close
from reward.functions.judge import chat_url, judge
from reward.functions.reward_model import reward_model
from reward.functions.template import fill
from steplog.rewards import Reward, RewardFailed, RewardUnavailable
from tests.reward.trajectories import make_trajectory

SAID = [(0.5, "Score: 5"), (0.0, "score = 0"), (1.0, "**Score:** 10"), (0.75, "Score:\n7.5 of 10")]


class Server:
    """Answers with what it was given, in turn, the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.asked: list[tuple[str, Any, str | None]] = []
        self.url = ""

    def says(self, *texts: str | None) -> None:
        self.answers = [{"choices": [{"message": {"content": text}}]} for text in texts]

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(
            (request.path, await request.json(), request.headers.get("Authorization"))
        )
        given = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(given, int):
            return web.Response(status=given, text="no")
        if isinstance(given, str):
            return web.Response(text=given)
        return web.json_response(given)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_post("/{path:.*}", server.answer)
    async with TestServer(app) as running:
        server.url = str(running.make_url("")).rstrip("/")
        yield server
        await close()


async def judged(server: Server, trajectory: Any = None, **settings: Any) -> Reward:
    score: Any = judge(url=f"{server.url}/v1", model="wise", **settings)
    reward = await score(trajectory or make_trajectory("42", prompt="6 * 7?"))
    assert isinstance(reward, Reward)
    return reward


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, value) for value, text in SAID),
        ("Score: 3? No.\nScore: 8", 0.8),
        ("score 10/10", 1.0),
    ],
)
async def test_the_score_is_read_and_scaled(server: Server, text: str, value: float) -> None:
    server.says(text)
    reward = await judged(server)
    assert reward.value == pytest.approx(value)
    assert reward.details["judgement"] == text


async def test_the_judge_is_asked_as_set(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    template = tmp_path / "template.txt"
    template.write_text("{prompt} | {response} | {metadata[answer]} | {other} {}")
    server.says("<grade>3</grade>")
    reward = await judged(
        server,
        make_trajectory("It is {prompt}.", prompt="{response}?", answer=[1, 2]),
        prompt=str(template),
        score="<grade>(.)</grade>",
        low=1,
        high=5,
        api_key_env="JUDGE_KEY",
        temperature=0.5,
        max_tokens=9,
    )
    assert reward.value == 0.5
    [(path, body, key)] = server.asked
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    content = "{response}? | It is {prompt}. | [1,2] | {other} {}"
    assert body == {
        "model": "wise",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.5,
        "max_tokens": 9,
    }


async def test_the_template_that_is_there(server: Server) -> None:
    server.says("Score: 5")
    await judged(server, low=-1, high=7.5)
    content = server.asked[0][1]["messages"][0]["content"]
    assert "<asked>\n6 * 7?\n</asked>" in content and "<response>\n42\n</response>" in content
    assert "from -1 (useless) to 7.5" in content and "{" not in content


def test_places_in_a_template() -> None:
    trajectory = make_trajectory("a", "b", prompt="p", question="why?")
    assert fill("{prompt}{response}{metadata[question]}", trajectory) == "pbwhy?"
    assert fill("{transcript}", trajectory) == "pa\nb"
    assert fill("{prompt}{transcript}{response}", make_trajectory()) == ""
    with pytest.raises(RewardFailed, match="needs metadata"):
        fill("{metadata[missing]}", trajectory)


async def test_votes_are_averaged(server: Server) -> None:
    server.says("Score: 2", "Score: 3", "Score: 7")
    reward = await judged(server, votes=3, temperature=1.0)
    assert reward.value == pytest.approx(0.4)
    assert sorted(reward.details["scores"]) == [2, 3, 7]


async def test_a_score_that_cannot_be_read_is_asked_for_again(server: Server) -> None:
    for unreadable in ("Good!", "Score: 11", "Score: -1", "", None):
        server.says(unreadable, "Score: 5")
        assert (await judged(server)).value == 0.5
    server.says("Good!")
    server.asked.clear()
    with pytest.raises(RewardFailed, match="no readable score"):
        await judged(server)
    assert len(server.asked) == 2


async def test_a_vote_that_cannot_be_read_is_left_out(server: Server) -> None:
    server.says("Good!", "Good!", "Good!", "Score: 4")
    reward = await judged(server, votes=3, temperature=1.0)
    assert reward.value == 0.4 and set(reward.details["scores"]) == {4}


async def model_scored(server: Server, **settings: Any) -> float:
    score: Any = reward_model(url=server.url, model="fair", **settings)
    value = await score(make_trajectory("42", prompt="6 * 7?", question="What is it?"))
    assert isinstance(value, float)
    return value


FAULTS: list[tuple[Any, type[Exception]]] = [
    (400, RewardFailed),
    (413, RewardFailed),
    (422, RewardFailed),
    *((status, RewardUnavailable) for status in (401, 403, 404, 408, 429, 500, 502, 503, 504)),
    ("not JSON", RewardFailed),
    ({"choices": []}, RewardFailed),
    ({}, RewardFailed),
    ([], RewardFailed),
]


@pytest.mark.parametrize(("answer", "error"), FAULTS)
async def test_faults(server: Server, answer: Any, error: type[Exception]) -> None:
    server.answers = [answer]
    with pytest.raises(error):
        await judged(server, votes=2, temperature=1.0)
    with pytest.raises(error):
        await model_scored(server)


async def test_a_server_that_is_away_is_waited_for(server: Server, unused_tcp_port: int) -> None:
    server.url = f"http://127.0.0.1:{unused_tcp_port}"
    with pytest.raises(RewardUnavailable):
        await judged(server)
    with pytest.raises(RewardUnavailable):
        await model_scored(server)


async def test_a_connection_that_breaks_is_waited_for(server: Server) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()

    broken = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with broken:
        server.url = f"http://127.0.0.1:{broken.sockets[0].getsockname()[1]}"
        with pytest.raises(RewardUnavailable):
            await judged(server)


def test_settings_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    for settings, why in [
        ({"low": 1.0, "high": 1.0}, "low must be below high"),
        ({"votes": 0}, "votes must be above 0"),
        ({"votes": 2}, "need a temperature above 0"),
        ({"api_key_env": "JUDGE_KEY"}, "JUDGE_KEY is not set"),
    ]:
        with pytest.raises(ValueError, match=why):
            judge("http://judge", "wise", **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="classify or pooling"):
        reward_model("http://model", "fair", route="score")


@pytest.mark.parametrize("url", ["http://j/v1", "http://j/v1/", "http://j/v1/chat/completions"])
def test_the_url_may_be_whole(url: str) -> None:
    assert chat_url(url) == "http://j/v1/chat/completions"


CONVERSATION = [
    {"role": "user", "content": "6 * 7?"},
    {"role": "assistant", "content": "42"},
]
CLASSIFIED = {"data": [{"index": 0, "label": "good", "probs": [0.2, 0.8], "num_classes": 2}]}


@pytest.mark.parametrize(
    ("settings", "answer", "path", "asked", "value"),
    [
        ({}, CLASSIFIED, "/classify", {"messages": CONVERSATION}, 0.2),
        ({"label": 1}, CLASSIFIED, "/classify", {"messages": CONVERSATION}, 0.8),
        (
            {"raw": True, "text": "{metadata[question]} {response}"},
            CLASSIFIED,
            "/classify",
            {"input": "What is it? 42", "use_activation": False},
            0.2,
        ),
        (
            {"route": "pooling"},
            {"data": [{"index": 0, "object": "pooling", "data": [-1.5]}]},
            "/pooling",
            {"messages": CONVERSATION},
            -1.5,
        ),
        (
            {"route": "pooling"},
            {"data": [{"index": 0, "object": "pooling", "data": [[0.1], [0.2], [0.3]]}]},
            "/pooling",
            {"messages": CONVERSATION},
            0.3,
        ),
    ],
)
async def test_reward_models(
    server: Server, settings: Any, answer: Any, path: str, asked: Any, value: float
) -> None:
    server.answers = [answer]
    assert await model_scored(server, **settings) == value
    assert server.asked == [(path, {"model": "fair", **asked}, None)]


async def test_a_label_that_is_not_there_is_a_failure(server: Server) -> None:
    server.answers = [CLASSIFIED]
    with pytest.raises(RewardFailed, match="no score 2"):
        await model_scored(server, label=2)
