"""An answer in the shape of /responses: as output items, or as a stream of events.

Item ids are made from the Step's id and the item's index, so a rebuilt answer has the same ids.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from gateway.dialects.request import (
    Answer,
    AnswerDelta,
    ToolCallDelta,
    Usage,
    event,
    parse_arguments,
)
from gateway.dialects.responses_body import ToolName


class RequestEcho(NamedTuple):
    """What a response repeats of its request."""

    names: Mapping[str, ToolName]
    """The client's tools, by the names that the model sees."""
    fields: Mapping[str, Any]


class TextItem(msgspec.Struct):
    """An output item with text: a message or reasoning."""

    id: str
    part: str
    text: str = ""

    def body(self, status: str) -> dict[str, Any]:
        # An item that has just begun has no parts: content_part.added adds them.
        content = [] if status == "in_progress" else [self.content_part(self.text)]
        head: dict[str, Any] = {"id": self.id, "status": status, "content": content}
        if self.part == "reasoning_text":
            return head | {"type": "reasoning", "summary": []}
        return head | {"type": "message", "role": "assistant"}

    def content_part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self.part, "text": text}
        return part if self.part == "reasoning_text" else part | {"annotations": []}


class ToolCallItem(msgspec.Struct):
    """An output item that calls a function or a custom tool."""

    id: str
    call_id: str
    tool: ToolName
    arguments: str = ""

    def body(self, status: str) -> dict[str, Any]:
        head = {"id": self.id, "call_id": self.call_id, "name": self.tool.name, "status": status}
        if self.tool.namespace is not None:
            head["namespace"] = self.tool.namespace
        if self.tool.custom:
            return head | {"type": "custom_tool_call", "input": self.input()}
        return head | {"type": "function_call", "arguments": self.arguments}

    def input(self) -> str:
        """A custom tool's input, taken from the function call that the model wrote."""
        arguments = parse_arguments(self.arguments)
        text = arguments.get("input") if isinstance(arguments, dict) else None
        return text if isinstance(text, str) else self.arguments


def output_items(answer: Answer, names: Mapping[str, ToolName]) -> list[dict[str, Any]]:
    """The items of a complete answer. Clients expect at least one, so an answer without calls has a
    message even if it is empty."""
    items: list[TextItem | ToolCallItem] = []
    if answer.reasoning:
        items.append(_reasoning(answer.step_id, 0, answer.reasoning))
    if answer.content or not answer.tool_calls:
        items.append(_message(answer.step_id, len(items), answer.content))
    for call in answer.tool_calls:
        item = _tool_call(answer.step_id, len(items), call.id, _tool(call.name, names))
        item.arguments = call.arguments
        items.append(item)
    output = [item.body("completed") for item in items]
    output[-1]["status"] = _status(answer)
    return output


def finished_response(
    echo: RequestEcho, answer: Answer, output: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The complete response."""
    response = _response(echo, answer.step_id, answer.created, answer.model, _status(answer))
    response |= {"output": output, "usage": _usage(answer.usage)}
    response["system_fingerprint"] = answer.versions  # as in chat completions
    if answer.finish_reason == "length":
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    return response


class ResponsesWriter:
    """One streamed response. An item stays open until a delta of another kind arrives."""

    def __init__(self, echo: RequestEcho, step_id: str, created: int, model: str) -> None:
        self._echo = echo
        self._step_id = step_id
        self._initial = _response(echo, step_id, created, model, "in_progress")
        self._sequence = 0
        self._done: list[dict[str, Any]] = []
        self._open: TextItem | ToolCallItem | None = None
        self._call_index = -1

    def begin(self) -> bytes:
        created = self._event("response.created", response=self._initial)
        return created + self._event("response.in_progress", response=self._initial)

    def delta(self, delta: AnswerDelta) -> bytes:
        # A delta that ends one call and begins another may also have the text between them.
        continued = [call for call in delta.tool_calls if call.index == self._call_index]
        new = [call for call in delta.tool_calls if call.index != self._call_index]
        events = b"".join(self._add_call(call) for call in continued)
        if delta.reasoning:
            events += self._add_text("reasoning_text", delta.reasoning)
        if delta.content:
            events += self._add_text("output_text", delta.content)
        return events + b"".join(self._add_call(call) for call in new)

    def end(self, answer: Answer) -> bytes:
        events = b""
        if self._call_index < 0 and not self._is_open("output_text"):
            events += self._add_text("output_text", "")
        status = _status(answer)
        events += self._close(status)
        return events + self._event(
            f"response.{status}", response=finished_response(self._echo, answer, self._done)
        )

    def error(self, message: str, kind: str) -> bytes:
        """OpenAI's error event, then the event that Codex waits for."""
        error = {"code": "server_error", "message": message}
        failed = self._initial | {"status": "failed", "error": error, "output": self._done}
        error_event = self._event("error", code=kind, message=message, param=None)
        return error_event + self._event("response.failed", response=failed)

    def _add_text(self, part: str, text: str) -> bytes:
        events = b""
        if not self._is_open(part):
            events += self._close("completed")
            make_item = _reasoning if part == "reasoning_text" else _message
            item = make_item(self._step_id, len(self._done))
            events += self._open_item(item)
            events += self._part_event("content_part.added", part=item.content_part(""))
        assert isinstance(self._open, TextItem)
        self._open.text += text
        extra: dict[str, Any] = {"logprobs": []} if part == "output_text" else {}
        return events + (self._part_event(f"{part}.delta", delta=text, **extra) if text else b"")

    def _is_open(self, part: str) -> bool:
        return isinstance(self._open, TextItem) and self._open.part == part

    def _add_call(self, call: ToolCallDelta) -> bytes:
        events = b""
        if call.index != self._call_index:
            events += self._close("completed")
            self._call_index = call.index
            tool = _tool(call.name or "", self._echo.names)
            item = _tool_call(self._step_id, len(self._done), call.id or "", tool)
            events += self._open_item(item)
        assert isinstance(self._open, ToolCallItem)
        self._open.arguments += call.arguments
        # A custom tool's input is sent at the end: until then it is an incomplete JSON string.
        if call.arguments and not self._open.tool.custom:
            events += self._item_event("function_call_arguments.delta", delta=call.arguments)
        return events

    def _open_item(self, item: TextItem | ToolCallItem) -> bytes:
        self._open = item
        index, body = len(self._done), item.body("in_progress")
        return self._event("response.output_item.added", output_index=index, item=body)

    def _close(self, status: str) -> bytes:
        if self._open is None:
            return b""
        events = self._done_events(self._open)
        index, body = len(self._done), self._open.body(status)
        self._done.append(body)
        self._open = None
        return events + self._event("response.output_item.done", output_index=index, item=body)

    def _done_events(self, item: TextItem | ToolCallItem) -> bytes:
        if isinstance(item, TextItem):
            extra: dict[str, Any] = {"logprobs": []} if item.part == "output_text" else {}
            events = self._part_event(f"{item.part}.done", text=item.text, **extra)
            return events + self._part_event("content_part.done", part=item.content_part(item.text))
        if item.tool.custom:
            events = self._item_event("custom_tool_call_input.delta", delta=item.input())
            return events + self._item_event("custom_tool_call_input.done", input=item.input())
        fields = {"name": item.tool.name, "arguments": item.arguments}
        return self._item_event("function_call_arguments.done", **fields)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        ids = {"item_id": self._open.id, "output_index": len(self._done)}
        return self._event(f"response.{kind}", **ids, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        head = {"type": kind, "sequence_number": self._sequence}
        self._sequence += 1
        return event(msgspec.json.encode(head | fields), kind.encode())


def _reasoning(step_id: str, at: int, text: str = "") -> TextItem:
    return TextItem(f"rs_{step_id}_{at}", "reasoning_text", text)


def _message(step_id: str, at: int, text: str = "") -> TextItem:
    return TextItem(f"msg_{step_id}_{at}", "output_text", text)


def _tool_call(step_id: str, at: int, call_id: str, tool: ToolName) -> ToolCallItem:
    return ToolCallItem(f"{'ctc' if tool.custom else 'fc'}_{step_id}_{at}", call_id, tool)


def _tool(name: str, names: Mapping[str, ToolName]) -> ToolName:
    """The client's tool. Models may also call tools that were not offered."""
    return names.get(name) or ToolName(name)


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _response(
    echo: RequestEcho, step_id: str, created: int, model: str, status: str
) -> dict[str, Any]:
    return {
        "id": f"resp_{step_id}",
        "object": "response",
        "created_at": created,
        "model": model,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "store": False,
        **echo.fields,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
