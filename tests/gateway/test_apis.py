"""The other APIs and their real clients, and calls that name no trajectory."""

from typing import Any

import pytest

from schemas.packing import unpack_ids
from tests.gateway.client import (
    HELLO,
    asked,
    call,
    error,
    ids_of,
    only_step,
    response,
    said,
    steps,
)
from tests.gateway.running import RunningGateway
from tests.gateway.stub_engine import StubEngine
from tests.tiny_model import EOS

pytestmark = pytest.mark.broker

LOOK = call("look", '{"at":"home"}')


@pytest.mark.parametrize("stream", [False, True])
def test_text_completions_record_the_prompt_as_it_is(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str, stream: bool
) -> None:
    stub.script([said(" time")])
    answers: Any = gateway.openai(uid, prompt_uid).completions.create(
        model="default", prompt="once upon a", stream=stream
    )
    parts = list(answers) if stream else [answers]
    assert "".join(part.choices[0].text for part in parts) == " time"
    assert parts[-1].choices[0].finish_reason == "stop"
    step = only_step(gateway, uid)
    assert parts[0].id == f"cmpl-{step.step_id}"
    assert list(unpack_ids(step.prompt_ids)) == list(b"once upon a") == asked(stub)[0]
    assert response(step) == [*b" time", EOS]


def test_completions_take_ids(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    gateway.openai(uid, prompt_uid).completions.create(model="", prompt=[5, 6, 7], max_tokens=3)
    assert asked(stub) == [[5, 6, 7]]
    assert stub.requests()[-1]["sampling_params"]["max_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_is_served(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str, stream: bool
) -> None:
    stub.script([said(f"I look.{LOOK}", chunk=5)])
    asking: Any = {
        "model": "default",
        "max_tokens": 50,
        "system": "be brief",
        "messages": HELLO,
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    }
    messages = gateway.anthropic(uid, prompt_uid).messages
    if stream:
        with messages.stream(**asking) as events:
            answer: Any = events.get_final_message()
    else:
        answer = messages.create(**asking)
    assert [block.type for block in answer.content] == ["text", "tool_use"]
    assert answer.content[0].text == "I look."
    assert (answer.content[1].name, answer.content[1].input) == ("look", {"at": "home"})
    assert answer.stop_reason == "tool_use"
    assert answer.usage.input_tokens == len(asked(stub)[0])
    step = only_step(gateway, uid)
    assert answer.id == f"msg_{step.step_id}"
    assert response(step) == [*ids_of(f"I look.{LOOK}"), EOS]


def test_anthropics_client_counts_tokens(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    client = gateway.anthropic(uid, prompt_uid)
    counted = client.messages.count_tokens(model="default", messages=HELLO)
    client.messages.create(model="default", messages=HELLO, max_tokens=9)
    assert counted.input_tokens == len(asked(stub)[0])
    assert len(steps(gateway, uid)) == 1


def test_errors_on_messages_have_anthropics_shape(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    reply = gateway.post(f"/{uid}/{prompt_uid}/v1/messages", {"messages": HELLO})
    assert reply.status == 400
    assert reply.body["type"] == "error"
    assert reply.body["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in reply.body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_client_is_served(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str, stream: bool
) -> None:
    stub.script([said("well done")])
    responses = gateway.openai(uid, prompt_uid).responses
    if stream:
        with responses.stream(model="default", input="hello", instructions="be brief") as events:
            answer: Any = events.get_final_response()
    else:
        answer = responses.create(model="default", input="hello", instructions="be brief")
    assert answer.output_text == "well done"
    assert answer.status == "completed"
    step = only_step(gateway, uid)
    assert answer.id == f"resp_{step.step_id}"
    assert response(step) == [*b"well done", EOS]


def test_models_are_the_engines(gateway: RunningGateway, uid: str, prompt_uid: str) -> None:
    with gateway.openai(uid, prompt_uid) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
    assert [model["id"] for model in gateway.get("/v1/models").body["data"]] == ["tiny"]


def test_one_model_is_asked_for(gateway: RunningGateway, uid: str, prompt_uid: str) -> None:
    with gateway.openai(uid, prompt_uid) as client:
        assert client.models.retrieve("tiny").id == client.models.retrieve("default").id == "tiny"
    reply = gateway.get("/v1/models/some/other")
    assert (reply.status, error(reply)["code"]) == (404, "model_not_found")
    assert "tiny" in error(reply)["message"]


# Without a trajectory


def test_a_probe_without_a_trajectory_is_answered_and_not_recorded(
    gateway: RunningGateway, stub: StubEngine
) -> None:
    import openai

    before = gateway.metric("steps_published_total")
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="x", messages=[{"role": "user", "content": "hi"}], max_tokens=1
    )
    assert answer.choices[0].message.content is not None
    assert gateway.metric("steps_published_total") == before


def test_a_long_call_without_a_trajectory_is_told_where_to_go(gateway: RunningGateway) -> None:
    reply = gateway.post("/v1/chat/completions", {"messages": HELLO})
    assert reply.status == 400
    assert error(reply)["code"] == "no_trajectory"
    assert "/init_trajectory" in error(reply)["message"]


def test_an_unknown_route_has_openais_shape(gateway: RunningGateway) -> None:
    assert error(gateway.get("/nowhere"))["type"] == "not_found_error"
    assert gateway.get("/nowhere").status == 404
    assert gateway.get("/init_trajectory").status == 405
    error(gateway.get("/init_trajectory"))
