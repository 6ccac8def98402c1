"""OpenAI's /responses: parsed, answered and streamed, with OpenAI's own client as the judge."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.dialects.request import Answer, AnswerDelta, Request, ToolCall, ToolCallDelta
from gateway.dialects.responses import Responses
from gateway.dialects.responses_body import ResponsesBody
from gateway.errors import ApiError, BadRequest
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

USER: Any = {"role": "user", "content": "Hi"}
VALID: dict[str, Any] = {"model": "m", "input": "Hi"}
READ: dict[str, Any] = {
    "type": "function",
    "name": "read",
    "description": "Reads.",
    "parameters": {"type": "object"},
    "strict": False,
}
SHOWN = {
    "type": "function",
    "function": {"name": "read", "description": "Reads.", "parameters": {"type": "object"}},
}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LF"},
}
MCP = {"type": "namespace", "name": "mcp__files", "description": "", "tools": [READ]}
REASONING: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": None}


def parsed(**changed: Any) -> Request:
    return Responses().parse(json.dumps(VALID | changed).encode())


def openai(served: Served) -> OpenAI:
    return OpenAI(api_key="k", base_url="http://gateway/v1", http_client=served.http)


def text(role: str, told: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": told}]}


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str, told: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": told}


CODEX: dict[str, Any] = VALID | {
    "instructions": "You are Codex.",
    "input": [
        text("developer", "Permissions."),
        text("user", "Look."),
        REASONING | {"content": [{"type": "reasoning_text", "text": "A file."}]},
        text("assistant", "Yes."),
        call("c1", "read", '{"path": "a"}'),
        call("c2", "list", "{}"),
        output("c1", "A"),
        output("c2", [{"type": "input_text", "text": "B"}, {"type": "input_text", "text": "C"}]),
        REASONING | {"content": None},
        text("assistant", "Done."),
        text("user", "On."),
    ],
    "tools": [READ, {"type": "web_search", "external_web_access": False}, PATCH, MCP],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "client_metadata": {},
}


def test_a_request_of_codex_is_taken_as_it_is() -> None:
    request = parsed(**CODEX)
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "read", "arguments": {"path": "a"}}},
        {"id": "c2", "type": "function", "function": {"name": "list", "arguments": {}}},
    ]
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "A file."}
    assert request.messages == [
        {"role": "system", "content": "You are Codex.\n\nPermissions."},
        {"role": "user", "content": "Look."},
        said | {"tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "A"},
        {"role": "tool", "tool_call_id": "c2", "content": "B\nC"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "On."},
    ]
    assert request.tools and request.tools[0] == SHOWN
    names = [tool["function"]["name"] for tool in request.tools]
    assert names == ["read", "apply_patch", "mcp__files__read"]
    assert request.tools[1]["function"]["description"].endswith("start: LF")
    assert request.template == {"reasoning_effort": "medium", "enable_thinking": True}
    assert request.sampling == {}


def test_plain_messages_need_no_type() -> None:
    request = parsed(input=[{"role": "system", "content": "Be brief."}, USER, text("user", "On.")])
    assert [message["content"] for message in request.messages] == ["Be brief.", "Hi", "On."]


def test_two_answers_in_a_row_stay_two() -> None:
    both = [text("assistant", "One."), text("assistant", "Two.")]
    contents = [message["content"] for message in parsed(input=[*both, USER]).messages]
    assert contents == ["One.", "Two.", "Hi"]


def test_settings_reach_the_engine() -> None:
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    request = parsed(
        temperature=0.5, top_p=0.9, max_output_tokens=7, text={"format": wanted}, seed=3
    )
    assert request.sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "max_tokens": 7,
        "structured_outputs": {"json": schema},
    }
    json_object = parsed(text={"format": {"type": "json_object"}})
    assert json_object.sampling == {"structured_outputs": {"json_object": True}}
    assert parsed(text={"format": {"type": "text"}}).sampling == {}
    none, low = ({"effort": effort} for effort in ("none", "low"))
    assert parsed(reasoning=none).template == {"reasoning_effort": "none", "enable_thinking": False}
    assert parsed(reasoning=low).template == {"reasoning_effort": "low", "enable_thinking": True}
    assert parsed(parallel_tool_calls=False).single_tool_call
    assert not parsed(parallel_tool_calls=True).single_tool_call


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "read"}, {"name": "read"}),
        ({"type": "custom", "name": "apply_patch"}, {"name": "apply_patch"}),
        (
            {"type": "function", "name": "read", "namespace": "mcp__files"},
            {"name": "mcp__files__read"},
        ),
    ],
)
def test_a_choice_of_tools_is_that_of_chat(choice: Any, meant: Any) -> None:
    request = parsed(tools=[READ, PATCH, MCP], tool_choice=choice)
    wanted = {"type": "function", "function": meant} if isinstance(meant, dict) else meant
    assert request.tool_choice == wanted
    assert request.forces_tool == (meant not in ("auto", "none"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": None},
        {"input": []},
        {"input": 5},
        {"input": ["Hi"]},
        {"input": [{}]},
        {"input": [{"role": "tool", "content": "Hi"}]},
        {"input": [{"role": ["user"], "content": "Hi"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
        {"input": [{"role": "user", "content": [{"text": "Hi"}]}]},
        {"input": [{"type": ["message"], "role": "user", "content": "Hi"}]},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"input": [{"type": "function_call", "call_id": "c", "name": "n"}]},
        {"input": [{"type": "function_call_output", "call_id": "c"}]},
        {"instructions": 5},
        {"tools": {}},
        {"tools": ["read"]},
        {"tools": [{"type": "function"}]},
        {"tools": [READ | {"parameters": "none"}]},
        {"tools": [{"type": "local_shell"}]},
        {"tools": [{"type": "file_search", "vector_store_ids": []}]},
        {"tools": [{"type": "namespace", "name": "n"}]},
        {"tools": [{"type": "namespace", "name": "n", "tools": [MCP]}]},
        {"tool_choice": "required"},
        {"tool_choice": "other", "tools": [READ]},
        {"tool_choice": {"type": "function", "name": "other"}, "tools": [READ]},
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [READ]},
        {"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]},
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"prompt": {"id": "p"}},
        {"background": True},
        {"top_logprobs": 3},
        {"include": ["message.output_text.logprobs"]},
        {"max_output_tokens": 0},
        {"text": {"format": {"type": "json_schema"}}},
        {"text": {"format": {"type": "xml"}}},
    ],
)
def test_a_body_that_cannot_be_served_is_told_so(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as told:
        parsed(**wrong)
    assert str(told.value)


def test_a_complaint_says_where_it_is() -> None:
    with pytest.raises(BadRequest) as told:
        parsed(input=[USER, {"role": "user", "content": 5}])
    assert told.value.param == "input[1].content"


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model":"\xff"}', b'{"tools":' + b"[" * 5000])
def test_bytes_that_are_no_body_are_told_so(body: bytes) -> None:
    with pytest.raises(BadRequest):
        Responses().parse(body)


@given(bodies(CODEX, ResponsesBody.__struct_fields__))
def test_only_api_errors_come_out_of_any_object(body: dict[str, Any]) -> None:
    try:
        request = Responses().parse(json.dumps(body).encode())
    except ApiError:
        return
    Responses().answer(request, an_answer())


@given(st.binary(max_size=40))
def test_only_api_errors_come_out_of_any_bytes(body: bytes) -> None:
    with pytest.raises(ApiError):
        Responses().parse(body)


def check(response: Response, answer: Answer) -> None:
    """The client's response says what the answer says."""
    assert response.id == f"resp_{STEP}"
    assert response.output_text == answer.content
    assert response.usage and response.usage.total_tokens == 18
    cut = answer.finish_reason == "length"
    assert response.status == ("incomplete" if cut else "completed")
    assert (response.incomplete_details is not None) == cut
    reasoning = [item for item in response.output if item.type == "reasoning"]
    texts = [part.text for item in reasoning for part in item.content or ()]
    assert "".join(texts) == answer.reasoning
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(item.call_id, item.name, item.arguments) for item in calls] == [
        (call.id, call.name, call.arguments) for call in answer.tool_calls
    ]


@pytest.mark.parametrize("name", ANSWERS)
def test_the_client_reads_the_answer_whole_and_streamed(name: str) -> None:
    answer = ANSWERS[name]
    served = Served(Responses(), answer)
    with openai(served) as client:
        whole = client.responses.create(model="m", input="Hi", temperature=0.5)
        events = list(client.responses.create(model="m", input="Hi", stream=True))
    Response.model_validate_json(Responses().answer(served.requests[0], answer))
    check(whole, answer)
    assert whole.temperature == 0.5
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    check(last.response, answer)
    assert [item.id for item in whole.output] == [item.id for item in last.response.output]
    assert last.response.temperature is None


@pytest.mark.parametrize(
    "name", [name for name in ANSWERS if ANSWERS[name].finish_reason != "length"]
)
def test_the_clients_own_accumulation_agrees(name: str) -> None:
    answer = ANSWERS[name]
    with (
        openai(Served(Responses(), answer)) as client,
        client.responses.stream(model="m", input="Hi") as stream,
    ):
        final = stream.get_final_response()
    check(final, answer)


@pytest.mark.parametrize("name", ANSWERS)
def test_every_event_has_openais_shape_and_name(name: str) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = streamed(Responses(), parsed(tools=[READ]), ANSWERS[name]).decode().strip()
    for told in events.split("\n\n"):
        named, data = told.split("\n")
        event = adapter.validate_json(data.removeprefix("data: "))
        assert event.type == named.removeprefix("event: ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_comes_back_as_what_it_was(name: str, stream: bool) -> None:
    answer = ANSWERS[name]
    served = Served(Responses(), answer)
    with openai(served) as client:
        if stream:
            last: Any = list(client.responses.create(model="m", input="Hi", stream=True))[-1]
            said = last.response.output
        else:
            said = client.responses.create(model="m", input="Hi").output
        dumped = [item.model_dump() for item in said]
        for back in (said, dumped):
            client.responses.create(model="m", input=[USER, *back, USER])
    for request in served.requests[1:]:
        assert [message["role"] for message in request.messages] == ["user", "assistant", "user"]
        assert essence(request.messages[1]) == essence(answer.message())
        assert request.messages[1].get("reasoning_content", "") == answer.reasoning


TOOLS = [
    ("apply_patch", '{"input": "*** Begin\\n\\"x\\""}', "custom_tool_call", None),
    ("mcp__files__read", '{"a": 1}', "function_call", "mcp__files"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "arguments", "kind", "namespace"), TOOLS)
def test_custom_and_namespaced_tools_are_called_by_the_clients_names(
    name: str, arguments: str, kind: str, namespace: str | None, stream: bool
) -> None:
    answer = an_answer("", tool_calls=[ToolCall(id="c", name=name, arguments=arguments)])
    served = Served(Responses(), answer)
    tools: Any = [PATCH, MCP]
    with openai(served) as client:
        if stream:
            with client.responses.stream(model="m", input="Hi", tools=tools) as told:
                item: Any = told.get_final_response().output[0]
        else:
            item = client.responses.create(model="m", input="Hi", tools=tools).output[0]
        back: Any = item.model_dump(exclude={"parsed_arguments"})
        done: Any = {"type": f"{kind}_output", "call_id": "c", "output": "ok"}
        client.responses.create(model="m", input=[USER, back, done], tools=tools)
    assert (item.type, item.namespace) == (kind, namespace)
    assert item.name == ("apply_patch" if namespace is None else "read")
    if kind == "custom_tool_call":
        assert item.input == '*** Begin\n"x"'
    assert essence(served.requests[-1].messages[1]) == essence(answer.message())
    assert served.requests[-1].messages[2] == {"role": "tool", "tool_call_id": "c", "content": "ok"}


def test_a_custom_call_in_the_wrong_shape_is_told_as_it_is() -> None:
    answer = an_answer("", tool_calls=[ToolCall(id="c", name="apply_patch", arguments='{"a": 1}')])
    told = msgspec.json.decode(Responses().answer(parsed(tools=[PATCH]), answer))
    assert told["output"][0]["input"] == '{"a": 1}'


def test_text_between_two_calls_does_not_break_the_first() -> None:
    first = ToolCallDelta(index=0, id="a", name="read", arguments='{"a":')
    parts = [
        ToolCallDelta(index=0, arguments="1}"),
        ToolCallDelta(index=1, id="b", name="list", arguments="{}"),
    ]
    calls = [
        ToolCall(id="a", name="read", arguments='{"a":1}'),
        ToolCall(id="b", name="list", arguments="{}"),
    ]
    answer = an_answer("\n", tool_calls=calls)
    told = [AnswerDelta(tool_calls=[first]), AnswerDelta(content="\n", tool_calls=parts)]
    http = replying(streamed(Responses(), parsed(), answer, *told))
    with (
        OpenAI(api_key="k", base_url="http://gateway/v1", http_client=http) as client,
        client.responses.stream(model="m", input="Hi") as stream,
    ):
        final = stream.get_final_response()
    check(final, answer)
    assert [item.type for item in final.output] == ["function_call", "message", "function_call"]
    back = [item.model_dump() for item in final.output]
    assert essence(parsed(input=[USER, *back]).messages[1]) == essence(answer.message())


def test_the_answer_repeats_only_what_was_asked() -> None:
    told = msgspec.json.decode(Responses().answer(parsed(), an_answer(tool_calls=CALLS)))
    assert told["tools"] == []
    assert not {"temperature", "top_p", "max_output_tokens", "metadata"} & set(told)
    asked = parsed(tools=[READ], tool_choice="none", metadata={"a": "b"}, max_output_tokens=5)
    told = msgspec.json.decode(Responses().answer(asked, an_answer()))
    assert (told["tools"], told["tool_choice"], told["metadata"]) == ([READ], "none", {"a": "b"})


def test_an_error_in_a_stream_reaches_the_client() -> None:
    writer = Responses().writer(parsed(), STEP, 1, "m")
    begun = writer.begin() + writer.delta(AnswerDelta(content="He"))
    http = replying(begun + writer.error("The engine is gone.", "server_error"))
    with OpenAI(api_key="k", base_url="http://gateway/v1", http_client=http) as client:
        events = list(client.responses.create(model="m", input="Hi", stream=True))
    error, failed = events[-2:]
    assert error.type == "error"
    assert error.message == "The engine is gone."
    assert failed.type == "response.failed"
    assert failed.response.error and failed.response.error.message == "The engine is gone."
