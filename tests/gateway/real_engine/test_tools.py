"""Tool calls and schemas, by the parsers and grammars of the engine."""

import json
from typing import Any

import openai
import pytest

from tests.gateway.client import HELLO, steps
from tests.gateway.real_engine.calls import (
    CALLING,
    FUNCTION,
    NO_WHITE_SPACE,
    REAL,
    TOOL,
    ask,
    assert_extended,
    say,
    streamed,
)
from tests.gateway.running import RunningGateway
from tests.tiny_model import saying

pytestmark = REAL

STRICT: Any = {"type": "function", "function": FUNCTION | {"strict": True}}


@pytest.mark.parametrize("call", [ask, streamed])
def test_tool_calls_are_parsed(client: openai.OpenAI, call: Any) -> None:
    twice = 'ok<tool_call>\n{"name":"f","arguments":{"x":"é👩\u200d🚀"}}\n</tool_call>' + (
        '\n<tool_call>\n{"name":"f","arguments":{}}\n</tool_call>'
    )
    (choice,) = call(client, tools=[TOOL], **say(twice)).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content.strip() == "ok"
    first, second = choice.message.tool_calls
    assert json.loads(first.function.arguments) == {"x": "é👩\u200d🚀"}
    assert json.loads(second.function.arguments) == {}
    assert first.function.name == second.function.name == "f"
    assert first.id and second.id and first.id != second.id


@pytest.mark.parametrize("call", [ask, streamed])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_tool_can_be_demanded(
    gateway: RunningGateway, client: openai.OpenAI, uid: str, call: Any, choice: Any
) -> None:
    limits: Any = {"max_tokens": 300, "seed": 5, "extra_body": NO_WHITE_SPACE}
    answer = call(client, tools=[STRICT], tool_choice=choice, parallel_tool_calls=False, **limits)
    calls = answer.choices[0].message.tool_calls
    assert {one.function.name for one in calls} == {"f"}
    assert all(json.loads(one.function.arguments)["x"] in (1, 2) for one in calls)
    assert answer.choices[0].finish_reason == "tool_calls"
    (step,) = steps(gateway, uid)
    assert step.not_trainable == "the distribution was changed by tool_choice"


def test_without_tools_the_raw_text_stays(client: openai.OpenAI) -> None:
    for call in (ask, streamed):
        (choice,) = call(client, **say(CALLING)).choices
        assert choice.message.content == CALLING
        assert not choice.message.tool_calls
        assert choice.finish_reason == "stop"


def test_anthropics_client_streams_a_tool_call(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    client = gateway.anthropic(uid, prompt_uid)
    tool: Any = {"name": "f", "description": "counts", "input_schema": FUNCTION["parameters"]}
    messages: Any = list(HELLO)
    for text in (CALLING, "bye"):
        with client.messages.stream(
            model="default",
            max_tokens=300,
            messages=messages,
            tools=[tool],
            extra_body=saying(text),
        ) as events:
            answer = events.get_final_message()
        messages += [{"role": "assistant", "content": answer.content}]
        if answer.stop_reason == "tool_use":
            called = answer.content[-1]
            assert called.type == "tool_use"
            assert (called.name, called.input) == ("f", {"x": 1})
            result = {"type": "tool_result", "tool_use_id": called.id, "content": "7"}
            messages += [{"role": "user", "content": [result]}]
    assert answer.stop_reason == "end_turn"
    assert_extended(gateway, uid, 2)


def test_the_responses_client_calls_a_tool(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    client = gateway.openai(uid, prompt_uid)
    tool: Any = {"type": "function", "strict": False} | FUNCTION
    items: Any = [{"role": "user", "content": "hello"}]
    with client.responses.stream(
        model="default", input=items, tools=[tool], extra_body=saying(CALLING)
    ) as events:
        answer = events.get_final_response()
    called = answer.output[-1]
    assert called.type == "function_call"
    assert (called.name, json.loads(called.arguments)) == ("f", {"x": 1})
    items += [item.to_dict() for item in answer.output]
    items += [{"type": "function_call_output", "call_id": called.call_id, "output": "7"}]
    last = client.responses.create(
        model="default", input=items, tools=[tool], extra_body=saying("bye")
    )
    assert last.output_text == "bye"
    assert_extended(gateway, uid, 2)


def test_a_schema_is_kept_to_and_the_step_is_marked(
    gateway: RunningGateway, client: openai.OpenAI, uid: str
) -> None:
    schema = {"name": "s", "schema": FUNCTION["parameters"]}
    for call in (ask, streamed):
        answer = call(
            client,
            response_format={"type": "json_schema", "json_schema": schema},
            extra_body=NO_WHITE_SPACE,
            max_tokens=100,
        )
        assert json.loads(answer.choices[0].message.content)["x"] in (1, 2)
    for step in steps(gateway, uid):
        assert "structured_outputs" in (step.not_trainable or "")
