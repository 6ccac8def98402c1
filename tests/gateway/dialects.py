"""What the tests of the dialects share: an answer, its stream, and clients that are given it."""

import copy
from collections.abc import Iterator
from typing import Any

import httpx2
from hypothesis import strategies as st

from gateway.dialects.request import (
    Answer,
    AnswerDelta,
    Dialect,
    Message,
    Request,
    ToolCall,
    ToolCallDelta,
    Usage,
)

STEP = "019c-step"
CALLS = [
    ToolCall(id="call_a", name="read", arguments='{"path": "a.txt", "lines": [1, 2]}'),
    ToolCall(id="call_b", name="list", arguments="{}"),
]


def an_answer(content: str = "Hello, world.", **changed: Any) -> Answer:
    calls = changed.get("tool_calls")
    plain: dict[str, Any] = {
        "step_id": STEP,
        "created": 1_700_000_000,
        "model": "small",
        "finish_reason": "tool_calls" if calls else "stop",
        "usage": Usage(prompt_tokens=11, completion_tokens=7),
    }
    return Answer(**plain | {"content": content} | changed)


ANSWERS = {
    "text": an_answer(),
    "empty": an_answer(""),
    "reasoning": an_answer("Yes.", reasoning="Is it? It is."),
    "only reasoning": an_answer("", reasoning="Too long", finish_reason="length"),
    "one call": an_answer("", tool_calls=CALLS[:1]),
    "all": an_answer("Let me look.\n\n", reasoning="I need a file.", tool_calls=CALLS),
    "white space": an_answer("\n\n", tool_calls=CALLS[1:]),
    "no arguments": an_answer("", tool_calls=[ToolCall(id="c", name="now", arguments="")]),
    "cut": an_answer("Hello, wor", finish_reason="length"),
}


def deltas(answer: Answer, size: int = 4) -> Iterator[AnswerDelta]:
    yield from (AnswerDelta(reasoning=part) for part in _parts(answer.reasoning, size))
    yield from (AnswerDelta(content=part) for part in _parts(answer.content, size))
    for at, call in enumerate(answer.tool_calls):
        yield AnswerDelta(tool_calls=[ToolCallDelta(index=at, id=call.id, name=call.name)])
        for part in _parts(call.arguments, size):
            yield AnswerDelta(tool_calls=[ToolCallDelta(index=at, arguments=part)])


def _parts(text: str, size: int) -> Iterator[str]:
    return (text[at : at + size] for at in range(0, len(text), size))


def streamed(dialect: Dialect, request: Request, answer: Answer, *told: AnswerDelta) -> bytes:
    writer = dialect.writer(request, answer.step_id, answer.created, answer.model)
    events = writer.begin()
    for delta in told or deltas(answer):
        events += writer.delta(delta)
    return events + writer.end(answer)


def replying(content: bytes, status: int = 200, kind: str = "text/event-stream") -> httpx2.Client:
    """HTTP on which everything is answered with the same bytes."""
    reply = httpx2.Response(status, content=content, headers={"content-type": kind})
    return httpx2.Client(transport=httpx2.MockTransport(lambda _: reply))


class Served:
    """A dialect behind a client's HTTP: every request is parsed, and answered with the answer."""

    def __init__(self, dialect: Dialect, answer: Answer) -> None:
        self.dialect = dialect
        self.answer = answer
        self.requests: list[Request] = []
        self.http = httpx2.Client(transport=httpx2.MockTransport(self._serve))

    def _serve(self, asked: httpx2.Request) -> httpx2.Response:
        request = self.dialect.parse(asked.read())
        self.requests.append(request)
        if request.stream:
            events = streamed(self.dialect, request, self.answer)
            return httpx2.Response(
                200, content=events, headers={"content-type": "text/event-stream"}
            )
        body = self.dialect.answer(request, self.answer)
        return httpx2.Response(200, content=body, headers={"content-type": "application/json"})


def essence(message: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    """What the gateway recognises an answer by when it comes back."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return message["role"], message["content"], calls


# fmt: off
WORDS = [
    "type", "role", "content", "text", "name", "input", "id", "call_id", "tool_use_id",
    "arguments", "output", "summary", "tools", "function", "parameters", "input_schema",
    "schema", "format", "json_schema", "user", "assistant", "system", "developer", "tool",
    "tool_use", "tool_result", "thinking", "redacted_thinking", "image", "message",
    "reasoning", "function_call", "custom", "function_call_output",
    "custom_tool_call", "custom_tool_call_output", "input_text", "output_text",
    "namespace", "refusal", "auto", "any", "none", "required", "enabled", "disabled",
]
# fmt: on

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3)
    | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=6)
    ),
    max_leaves=12,
)


@st.composite
def changed(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """The body with something else in up to three of its places, however deep."""
    whole: dict[str, Any] = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        place: Any = whole
        while True:
            key = draw(
                st.sampled_from(list(place) if isinstance(place, dict) else range(len(place)))
            )
            inner = place[key]
            if not (isinstance(inner, dict | list) and inner) or draw(st.integers(0, 3)) == 0:
                place[key] = draw(json_values)
                break
            place = inner
    return whole


def bodies(valid: dict[str, Any], fields: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    """A body with changes, or anything at all in the fields that the dialect knows."""
    return changed(valid) | st.dictionaries(st.sampled_from(fields), json_values, max_size=4)
