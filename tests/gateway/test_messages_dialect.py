"""Anthropic's /messages: parsed, answered and streamed, with Anthropic's own client as the judge."""

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from gateway.dialects.messages import (
    Messages,
    anthropic_error,
    parse_count_tokens,
)
from gateway.dialects.messages_body import MessagesBody
from gateway.dialects.request import Answer, AnswerDelta, Request, ToolCall, ToolCallDelta
from gateway.errors import (
    ApiError,
    BadRequest,
    Conflict,
    EngineFailed,
    NotFound,
    TooLarge,
    TooMany,
    Unauthorized,
    Unavailable,
    Unprocessable,
)
from tests.gateway.dialects import (
    ANSWERS,
    CALLS,
    STEP,
    Served,
    an_answer,
    bodies,
    essence,
    replying,
    streamed,
)

if TYPE_CHECKING:  # it takes seconds to import, so only the tests that need it do
    from anthropic import Anthropic
    from anthropic.types import Message, MessageParam

USER: "MessageParam" = {"role": "user", "content": "Hi"}
VALID: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [USER]}
READ = {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}}
SHOWN = {
    "type": "function",
    "function": {"name": "read", "description": "Reads.", "parameters": {"type": "object"}},
}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
CACHED = {"cache_control": {"type": "ephemeral"}}
THOUGHT = {"type": "thinking", "thinking": "A file.", "signature": "s"}
USED = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "A"}]}
FAILED = {"type": "tool_result", "tool_use_id": "t2", "content": "gone", "is_error": True}
CLAUDE_CODE: dict[str, Any] = VALID | {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f;"},
        {"type": "text", "text": "You are Claude Code.", **CACHED},
        {"type": "text", "text": "Be brief."},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "Yes."}, USED]},
        {"role": "user", "content": [RESULT | CACHED, FAILED, {"type": "text", "text": "On."}]},
        {"role": "system", "content": "A reminder."},
    ],
    "tools": [READ | {"eager_input_streaming": True, **CACHED}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "metadata": {"user_id": "u"},
    "context_management": {"edits": []},
    "output_config": {"effort": "high"},
    "stream": True,
}


def parsed(**changed: Any) -> Request:
    return Messages().parse(json.dumps(VALID | changed).encode())


def anthropic(served: Served) -> "Anthropic":
    from anthropic import Anthropic

    return Anthropic(api_key="k", base_url="http://gateway", http_client=served.http)


def test_a_request_of_claude_code_is_taken_as_it_is() -> None:
    request = parsed(**CLAUDE_CODE)
    assert request.messages == [
        {"role": "system", "content": "You are Claude Code.\nBe brief."},
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": "Yes.",
            "reasoning_content": "A file.",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "read", "arguments": {"path": "a"}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "A"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: gone"},
        {"role": "user", "content": "On."},
        {"role": "system", "content": "A reminder."},
    ]
    assert request.tools == [SHOWN]
    assert request.template == {"enable_thinking": True}
    assert request.sampling == {"max_tokens": 5}
    assert request.stream


def test_settings_reach_the_engine() -> None:
    schema = {"type": "object"}
    request = parsed(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop_sequences=["END"],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert request.sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "max_tokens": 5,
        "stop": ["END"],
        "structured_outputs": {"json": schema},
    }


@pytest.mark.parametrize(
    ("thinking", "template"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, {}),
        (None, {}),
    ],
)
def test_thinking_is_a_variable_of_the_template(thinking: Any, template: Any) -> None:
    assert parsed(thinking=thinking).template == template


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "read"}, {"type": "function", "function": {"name": "read"}}),
    ],
)
def test_a_choice_of_tools_is_openais(choice: Any, meant: Any) -> None:
    request = parsed(tools=[READ], tool_choice=choice)
    assert request.tool_choice == meant
    assert (request.tools is None) == (meant == "none")
    assert request.forces_tool == (meant not in ("auto", "none"))


def test_a_single_tool_call_is_asked_for() -> None:
    single = {"type": "auto", "disable_parallel_tool_use": True}
    assert parsed(tools=[READ], tool_choice=single).single_tool_call
    assert not parsed(tools=[READ], tool_choice={"type": "auto"}).single_tool_call


def test_the_search_for_tools_is_left_out_since_all_are_shown() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    found = {"type": "tool_reference", "tool_name": "read"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [found]}
    request = parsed(
        tools=[search, READ | {"defer_loading": True, "type": "custom"}],
        messages=[{"role": "user", "content": [result]}],
    )
    assert request.tools == [SHOWN]
    assert request.messages == [{"role": "tool", "tool_call_id": "t", "content": "read"}]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"max_tokens": "5"},
        {"messages": []},
        {"messages": "Hi"},
        {"messages": [{"role": "tool", "content": "Hi"}]},
        {"messages": [{"role": ["user"], "content": "Hi"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [PICTURE]}]},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": ["Hi"]}]},
        {"messages": [USER, {"role": "assistant", "content": [PICTURE]}, USER]},
        {"messages": [USER, {"role": "assistant", "content": "{"}]},
        {"system": 5},
        {"system": [PICTURE]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"tools": [{"name": "read"}]},
        {"tools": [{"input_schema": {}}]},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool"}, "tools": [READ]},
        {"tool_choice": {"type": "tool", "name": "other"}, "tools": [READ]},
        {"tool_choice": "auto"},
        {"stop_sequences": [""]},
        {"temperature": -1},
        {"thinking": "enabled"},
        {"output_config": {"format": {"type": "json_schema"}}},
    ],
)
def test_a_body_that_cannot_be_served_is_told_so(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as told:
        parsed(**wrong)
    assert str(told.value)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model":"\xff"}', b'{"tools":' + b"[" * 5000])
def test_bytes_that_are_no_body_are_told_so(body: bytes) -> None:
    with pytest.raises(BadRequest):
        Messages().parse(body)


@given(bodies(CLAUDE_CODE, MessagesBody.__struct_fields__))
def test_only_api_errors_come_out_of_any_object(body: dict[str, Any]) -> None:
    from anthropic.types import Message

    try:
        request = Messages().parse(json.dumps(body).encode())
    except ApiError:
        return
    Message.model_validate_json(Messages().answer(request, an_answer()))


@given(st.binary(max_size=40))
def test_only_api_errors_come_out_of_any_bytes(body: bytes) -> None:
    with pytest.raises(ApiError):
        Messages().parse(body)


def check(message: "Message", answer: Answer) -> None:
    """The client's message says what the answer says."""
    assert message.id == f"msg_{STEP}"
    assert (message.usage.input_tokens, message.usage.output_tokens) == (11, 7)
    kinds = [block.type for block in message.content]
    wanted = ["thinking"] * bool(answer.reasoning) + ["text"] * bool(answer.content)
    assert kinds == wanted + ["tool_use"] * len(answer.tool_calls)
    for block in message.content:
        if block.type == "thinking":
            assert (block.thinking, block.signature) == (answer.reasoning, STEP)
        if block.type == "text":
            assert block.text == answer.content
    used = [block for block in message.content if block.type == "tool_use"]
    assert [(block.id, block.name) for block in used] == [
        (call.id, call.name) for call in answer.tool_calls
    ]


@pytest.mark.parametrize("name", ANSWERS)
def test_the_client_reads_the_answer_whole_and_streamed(name: str) -> None:
    from anthropic.types import Message

    answer = ANSWERS[name]
    served = Served(Messages(), answer)
    with anthropic(served) as client:
        whole = client.messages.create(model="m", max_tokens=5, messages=[USER])
        with client.messages.stream(model="m", max_tokens=5, messages=[USER]) as stream:
            final = stream.get_final_message()
    Message.model_validate_json(Messages().answer(served.requests[0], answer))
    check(whole, answer)
    check(final, answer)
    assert whole.stop_reason == final.stop_reason


@pytest.mark.parametrize("name", ANSWERS)
def test_every_event_has_anthropics_shape_and_name(name: str) -> None:
    from anthropic.types import RawMessageStreamEvent

    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    events = streamed(Messages(), parsed(), ANSWERS[name]).decode().strip().split("\n\n")
    for told in events:
        named, data = told.split("\n")
        event = adapter.validate_json(data.removeprefix("data: "))
        assert event.type == named.removeprefix("event: ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_comes_back_as_what_it_was(name: str, stream: bool) -> None:
    answer = ANSWERS[name]
    served = Served(Messages(), answer)
    with anthropic(served) as client:
        if stream:
            with client.messages.stream(model="m", max_tokens=5, messages=[USER]) as told:
                message: Message = told.get_final_message()
        else:
            message = client.messages.create(model="m", max_tokens=5, messages=[USER])
        said: Any = {"role": "assistant", "content": message.content}
        dumped: Any = {"role": "assistant", "content": message.model_dump()["content"]}
        for back in (said, dumped):
            client.messages.create(model="m", max_tokens=5, messages=[USER, back, USER])
    for request in served.requests[1:]:
        assert essence(request.messages[1]) == essence(answer.message())
        assert request.messages[1].get("reasoning_content", "") == answer.reasoning


@pytest.mark.parametrize("arguments", ["[1]", '{"path": "a', "3", '"a"'])
def test_arguments_that_are_no_object_come_back_as_they_were(arguments: str) -> None:
    answer = an_answer("", tool_calls=[ToolCall(id="t", name="read", arguments=arguments)])
    content = msgspec.json.decode(Messages().answer(parsed(), answer))["content"]
    assert content[0]["input"] == {"INVALID_JSON": arguments}
    request = parsed(messages=[USER, {"role": "assistant", "content": content}, USER])
    assert essence(request.messages[1]) == essence(answer.message())


@pytest.mark.parametrize(
    ("changed", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"finish_reason": "length"}, "max_tokens", None),
        ({"stop_sequence": "END"}, "stop_sequence", "END"),
        ({"tool_calls": CALLS}, "tool_use", None),
        ({"tool_calls": CALLS, "finish_reason": "stop"}, "tool_use", None),
        ({"tool_calls": CALLS, "finish_reason": "length"}, "max_tokens", None),
    ],
)
def test_the_client_knows_why_it_stopped(changed: Any, reason: str, sequence: str | None) -> None:
    told = msgspec.json.decode(Messages().answer(parsed(), an_answer(**changed)))
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, sequence)


def test_text_between_two_calls_does_not_break_the_first() -> None:
    from anthropic import Anthropic

    first = ToolCallDelta(index=0, id="a", name="read", arguments='{"a":')
    parts = [ToolCallDelta(index=0, arguments="1}"), ToolCallDelta(index=1, id="b", name="list")]
    answer = an_answer("\n", tool_calls=[CALLS[0], CALLS[1]])
    told = [AnswerDelta(tool_calls=[first]), AnswerDelta(content="\n", tool_calls=parts)]
    http = replying(streamed(Messages(), parsed(), answer, *told))
    with (
        Anthropic(api_key="k", base_url="http://gateway", http_client=http) as client,
        client.messages.stream(model="m", max_tokens=5, messages=[USER]) as stream,
    ):
        content: list[Any] = list(stream.get_final_message().content)
    assert [block.type for block in content] == ["tool_use", "text", "tool_use"]
    assert content[0].input == {"a": 1}
    back = {"role": "assistant", "content": [block.model_dump() for block in content]}
    assert parsed(messages=[USER, back, USER]).messages[1]["content"] == answer.content


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("No."), "invalid_request_error"),
        (Unauthorized("No."), "authentication_error"),
        (NotFound("No."), "not_found_error"),
        (Conflict("No."), "invalid_request_error"),
        (TooLarge("No."), "request_too_large"),
        (Unprocessable("No."), "invalid_request_error"),
        (TooMany("No."), "rate_limit_error"),
        (EngineFailed("No."), "api_error"),
        (Unavailable("No."), "overloaded_error"),
    ],
)
def test_errors_have_anthropics_shape(error: ApiError, kind: str) -> None:
    from anthropic import Anthropic, APIStatusError, BadRequestError

    http = replying(anthropic_error(error), error.status, "application/json")
    with (
        Anthropic(api_key="k", base_url="http://g", http_client=http, max_retries=0) as client,
        pytest.raises(APIStatusError) as told,
    ):
        client.messages.create(model="m", max_tokens=5, messages=[USER])
    assert told.value.body == {"type": "error", "error": {"type": kind, "message": "No."}}
    assert isinstance(told.value, BadRequestError) == (error.status == 400)


def test_an_error_in_a_stream_reaches_the_client() -> None:
    from anthropic import Anthropic, APIStatusError

    writer = Messages().writer(parsed(), STEP, 1, "m")
    http = replying(writer.begin() + writer.error("The engine is gone.", "server_error"))
    with (
        Anthropic(api_key="k", base_url="http://gateway", http_client=http) as client,
        client.messages.stream(model="m", max_tokens=5, messages=[USER]) as stream,
        pytest.raises(APIStatusError) as told,
    ):
        stream.get_final_message()
    body: Any = told.value.body
    assert body["error"] == {"type": "api_error", "message": "The engine is gone."}


def test_tokens_are_counted_without_max_tokens() -> None:
    body = {"model": "m", "messages": [USER, {"role": "assistant", "content": "Yes"}]}
    request = parse_count_tokens(json.dumps(body | {"tools": [READ]}).encode())
    assert [message["role"] for message in request.messages] == ["user", "assistant"]
    assert request.tools == [SHOWN]
    with pytest.raises(BadRequest):
        parse_count_tokens(b"{}")
