"""What is recorded of calls on each of OpenAI's routes, and how the page shows it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from steplog.environment.backends.recording import Call, Recorder, Recording
from steplog.environment.records.messages import UNFOLDED, render_message
from steplog.environment.records.page import render_page

CHOICE = {"index": 0, "text": "four", "finish_reason": "length", "logprobs": None}
COMPLETION = {"id": "c", "object": "text_completion", "created": 0, "model": "m"}
OUTPUT: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "let me see"}]},
    {"type": "function_call", "id": "f", "call_id": "f", "name": "add", "arguments": '{"a": 2}'},
    {
        "type": "message",
        "id": "m",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "four", "annotations": []}],
    },
]
RESPONSE = {
    "id": "r",
    "object": "response",
    "created_at": 0,
    "model": "m",
    "status": "incomplete",
    "output": OUTPUT,
    "usage": {"output_tokens": 7},
}


def streamed(*events: Any) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events)


def recorded(answer: Any, ask: Callable[[AsyncOpenAI], Awaitable[Any]]) -> Call:
    """What the recorder records when a server gives this answer."""

    is_stream = isinstance(answer, str)
    kind = "text/event-stream" if is_stream else "application/json"

    async def body() -> AsyncIterator[bytes]:
        yield (answer if is_stream else json.dumps(answer)).encode()

    def serve(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=body(), headers={"content-type": kind})

    recording = Recording()

    async def run() -> None:
        http = httpx2.AsyncClient(transport=Recorder(httpx2.MockTransport(serve), recording, print))
        async with AsyncOpenAI(base_url="http://m/v1", api_key="k", http_client=http) as client:
            told = await ask(client)
            if is_stream:
                [event async for event in told]

    asyncio.run(run())
    (call,) = recording.calls
    return call


@pytest.mark.parametrize(
    "answer",
    [
        COMPLETION | {"choices": [CHOICE], "usage": {"completion_tokens": 7}},
        streamed(
            COMPLETION | {"choices": [CHOICE | {"text": "fo", "finish_reason": None}]},
            COMPLETION | {"choices": [CHOICE | {"text": "ur"}], "usage": {"completion_tokens": 7}},
        ),
    ],
    ids=["whole", "streamed"],
)
def test_a_completion_is_heard(answer: Any) -> None:
    is_stream = isinstance(answer, str)
    call = recorded(
        answer,
        lambda client: client.completions.create(model="m", prompt="2 + 2 =", stream=is_stream),
    )
    assert call.messages == [{"role": "user", "content": "2 + 2 ="}]
    assert call.answer == {"role": "assistant", "content": "four"}
    assert (call.finish_reason, call.tokens) == ("length", 7)


@pytest.mark.parametrize(
    "answer",
    [
        RESPONSE,
        streamed(
            {
                "type": "response.created",
                "sequence_number": 0,
                "response": RESPONSE | {"output": []},
            },
            {"type": "response.incomplete", "sequence_number": 1, "response": RESPONSE},
        ),
    ],
    ids=["whole", "streamed"],
)
def test_a_response_is_heard(answer: Any) -> None:
    call = recorded(
        answer,
        lambda client: client.responses.create(
            model="m", instructions="be brief", input="2 + 2?", stream=isinstance(answer, str)
        ),
    )
    assert [message["content"] for message in call.messages] == ["be brief", "2 + 2?"]
    assert (call.finish_reason, call.tokens) == ("length", 7)
    shown = render_message(call.answer)
    assert "let me see" in shown and "<b>add</b>" in shown and "four" in shown


def test_pictures_are_shown_only_if_they_stand_in_the_message() -> None:
    def shown(url: str) -> str:
        return render_message(
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        )

    assert '<img alt="" src="data:image/png;base64,iVBO=">' in shown("data:image/png;base64,iVBO=")
    for url in (
        "https://elsewhere/x.png",
        "data:image/svg+xml;base64,aa",
        'data:image/png"onerror=',
    ):
        assert "<img" not in shown(url)


def test_the_end_of_a_long_text_is_folded() -> None:
    said = "word " * UNFOLDED
    shown = render_message({"role": "assistant", "content": said})
    assert f"{len(said.strip()) - UNFOLDED:,} more characters" in shown
    assert "<details" not in render_message({"role": "assistant", "content": "word " * 100})


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": "critic", "content": {"verdict": "<b>"}},
        {"role": "tool", "content": "[1, <b>"},
        {"role": "assistant", "content": "```\n<b>", "tool_calls": [{"custom": "<b>"}, None]},
        {"role": "assistant", "content": [None, 1, {"type": "refusal", "refusal": "<b>"}]},
    ],
)
def test_odd_messages_are_shown_and_stay_text(message: Any) -> None:
    assert "<b>" not in render_message(message)


def test_a_group_tells_its_rewards_at_a_glance() -> None:
    about: dict[str, Any] = {
        "rewards": {},
        "advantage": None,
        "status": "completed",
        "reason": None,
    }
    about |= {"metrics": {}, "seconds": 1.0, "tokens": 3, "conversations": [], "speakers": []}
    rollouts = [about | {"reward": reward} for reward in (1.0, -1.0, 0.0, None)]
    shown = render_page("t", [{"number": 1, "prompt_uid": "p", "item": "i", "rollouts": rollouts}])
    dots = "".join(
        f"<span class={colour}>{dot}</span>"
        for colour, dot in (("good", "●"), ("bad", "●"), ("dim", "●"), ("dim", "○"))
    )
    assert dots in shown
