"""Fields of chat completions: each has its effect, or is refused."""

import json
from typing import Any

import msgspec
import pytest

from gateway.dialects.chat import Chat, ChatBody
from gateway.dialects.completions import Completions
from gateway.dialects.refused_fields import REFUSED, RefusingBody
from gateway.dialects.request import Request
from gateway.dialects.sampling import SamplingBody
from gateway.errors import BadRequest
from tests.gateway.client import HELLO, TOOLS


def parsed(**fields: Any) -> Request:
    return Chat().parse(json.dumps({"messages": HELLO, **fields}).encode())


def test_a_single_tool_call_is_asked_for() -> None:
    assert parsed(tools=TOOLS, parallel_tool_calls=False).single_tool_call
    for fields in ({}, {"parallel_tool_calls": True}, {"parallel_tool_calls": None}):
        assert not parsed(tools=TOOLS, **fields).single_tool_call


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": None}, {}),
        (
            {"reasoning_effort": "high"},
            {"reasoning_effort": "high", "enable_thinking": True},
        ),
        (
            {"reasoning_effort": "none"},
            {"reasoning_effort": "none", "enable_thinking": False},
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
    ],
)
def test_the_effort_of_reasoning_reaches_the_template(fields: Any, variables: Any) -> None:
    assert parsed(**fields).template == variables


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_would_change_the_answer_is_refused(name: str) -> None:
    for dialect, body in ((Chat(), {"messages": HELLO}), (Completions(), {"prompt": "a"})):
        for value in ([{"name": "f"}], "auto", 0, True):
            with pytest.raises(BadRequest, match=f"^{name} is not supported. .+") as refusal:
                dialect.parse(json.dumps(body | {name: value}).encode())
            assert refusal.value.param == name
        for neutral in (None, False):
            dialect.parse(json.dumps(body | {name: neutral}).encode())


def test_every_refused_field_is_read() -> None:
    names = {field.name for field in msgspec.structs.fields(RefusingBody)}
    assert names - {field.name for field in msgspec.structs.fields(SamplingBody)} == set(REFUSED)
    assert names < {field.name for field in msgspec.structs.fields(ChatBody)}


def test_an_answer_with_a_function_call_of_old_is_refused() -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}}
    with pytest.raises(BadRequest, match=r"messages\[1\].function_call .* tool_calls"):
        parsed(messages=[*HELLO, old])
