"""An answer in the shape of /responses: as output items, or as the events in which they grow.

Ids come from the Step and the item's place, so an answer that is rebuilt has the same ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from gateway.dialects.request import Answer, Delta, ToolCallDelta, Usage, event, parsed
from gateway.dialects.responses_body import ToolName


class Echo(NamedTuple):
    """What the answer needs of its request."""

    names: Mapping[str, ToolName]
    """The client's tools, by the names that the model knows."""
    fields: Mapping[str, Any]


class Said(msgspec.Struct):
    """A message or its reasoning."""

    id: str
    part: str
    text: str = ""

    def item(self, status: str) -> dict[str, Any]:
        # An item that has just begun has no parts: content_part.added brings them.
        content = [] if status == "in_progress" else [self.told(self.text)]
        head: dict[str, Any] = {"id": self.id, "status": status, "content": content}
        if self.part == "reasoning_text":
            return head | {"type": "reasoning", "summary": []}
        return head | {"type": "message", "role": "assistant"}

    def told(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self.part, "text": text}
        return part if self.part == "reasoning_text" else part | {"annotations": []}


class Called(msgspec.Struct):
    """A call of a function or of a custom tool."""

    id: str
    call_id: str
    tool: ToolName
    arguments: str = ""

    def item(self, status: str) -> dict[str, Any]:
        head = {"id": self.id, "call_id": self.call_id, "name": self.tool.name, "status": status}
        if self.tool.namespace is not None:
            head["namespace"] = self.tool.namespace
        if self.tool.custom:
            return head | {"type": "custom_tool_call", "input": self.input()}
        return head | {"type": "function_call", "arguments": self.arguments}

    def input(self) -> str:
        """A custom tool's text, out of the function call that the model made of it."""
        arguments = parsed(self.arguments)
        text = arguments.get("input") if isinstance(arguments, dict) else None
        return text if isinstance(text, str) else self.arguments


def items(answer: Answer, names: Mapping[str, ToolName]) -> list[dict[str, Any]]:
    """A message is there even if it is empty, unless there are calls: clients expect one item."""
    said: list[Said | Called] = []
    if answer.reasoning:
        said.append(_reasoning(answer.step_id, 0, answer.reasoning))
    if answer.content or not answer.tool_calls:
        said.append(_message(answer.step_id, len(said), answer.content))
    for call in answer.tool_calls:
        called = _called(answer.step_id, len(said), call.id, _tool(call.name, names))
        called.arguments = call.arguments
        said.append(called)
    done = [item.item("completed") for item in said]
    done[-1]["status"] = _status(answer)
    return done


def finished(echo: Echo, answer: Answer, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The response, whole."""
    response = _response(echo, answer.step_id, answer.created, answer.model, _status(answer))
    response |= {"output": output, "usage": _usage(answer.usage)}
    if answer.finish_reason == "length":
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    return response


class ResponsesWriter:
    """One streamed response. An item is open until a delta of another kind comes."""

    def __init__(self, echo: Echo, step_id: str, created: int, model: str) -> None:
        self._echo = echo
        self._step_id = step_id
        self._begun = _response(echo, step_id, created, model, "in_progress")
        self._sequence = 0
        self._done: list[dict[str, Any]] = []
        self._open: Said | Called | None = None
        self._call = -1

    def begin(self) -> bytes:
        created = self._event("response.created", response=self._begun)
        return created + self._event("response.in_progress", response=self._begun)

    def delta(self, delta: Delta) -> bytes:
        # A part that ends one call and begins another may hold the text between them.
        going_on = [call for call in delta.tool_calls if call.index == self._call]
        begun = [call for call in delta.tool_calls if call.index != self._call]
        events = b"".join(self._called(call) for call in going_on)
        if delta.reasoning:
            events += self._say("reasoning_text", delta.reasoning)
        if delta.content:
            events += self._say("output_text", delta.content)
        return events + b"".join(self._called(call) for call in begun)

    def end(self, answer: Answer) -> bytes:
        events = b""
        if self._call < 0 and not self._is_saying("output_text"):
            events += self._say("output_text", "")
        status = _status(answer)
        events += self._close(status)
        return events + self._event(
            f"response.{status}", response=finished(self._echo, answer, self._done)
        )

    def error(self, message: str, kind: str) -> bytes:
        """OpenAI's own event, then the one that Codex waits for."""
        about = {"code": "server_error", "message": message}
        failed = self._begun | {"status": "failed", "error": about, "output": self._done}
        told = self._event("error", code=kind, message=message, param=None)
        return told + self._event("response.failed", response=failed)

    def _say(self, part: str, text: str) -> bytes:
        events = b""
        if not self._is_saying(part):
            events += self._close("completed")
            begin = _reasoning if part == "reasoning_text" else _message
            said = begin(self._step_id, len(self._done))
            events += self._begin(said)
            events += self._of_part("content_part.added", part=said.told(""))
        assert isinstance(self._open, Said)
        self._open.text += text
        extra: dict[str, Any] = {"logprobs": []} if part == "output_text" else {}
        return events + (self._of_part(f"{part}.delta", delta=text, **extra) if text else b"")

    def _is_saying(self, part: str) -> bool:
        return isinstance(self._open, Said) and self._open.part == part

    def _called(self, call: ToolCallDelta) -> bytes:
        events = b""
        if call.index != self._call:
            events += self._close("completed")
            self._call = call.index
            tool = _tool(call.name or "", self._echo.names)
            events += self._begin(_called(self._step_id, len(self._done), call.id or "", tool))
        assert isinstance(self._open, Called)
        self._open.arguments += call.arguments
        # The text of a custom tool is told at the end: until then it is half a JSON string.
        if call.arguments and not self._open.tool.custom:
            events += self._of_item("function_call_arguments.delta", delta=call.arguments)
        return events

    def _begin(self, item: Said | Called) -> bytes:
        self._open = item
        told = item.item("in_progress")
        return self._event("response.output_item.added", output_index=len(self._done), item=told)

    def _close(self, status: str) -> bytes:
        if self._open is None:
            return b""
        events = self._whole(self._open)
        item, at = self._open.item(status), len(self._done)
        self._done.append(item)
        self._open = None
        return events + self._event("response.output_item.done", output_index=at, item=item)

    def _whole(self, item: Said | Called) -> bytes:
        if isinstance(item, Said):
            extra: dict[str, Any] = {"logprobs": []} if item.part == "output_text" else {}
            events = self._of_part(f"{item.part}.done", text=item.text, **extra)
            return events + self._of_part("content_part.done", part=item.told(item.text))
        if item.tool.custom:
            events = self._of_item("custom_tool_call_input.delta", delta=item.input())
            return events + self._of_item("custom_tool_call_input.done", input=item.input())
        told = {"name": item.tool.name, "arguments": item.arguments}
        return self._of_item("function_call_arguments.done", **told)

    def _of_part(self, kind: str, **told: Any) -> bytes:
        return self._of_item(kind, content_index=0, **told)

    def _of_item(self, kind: str, **told: Any) -> bytes:
        assert self._open is not None
        place = {"item_id": self._open.id, "output_index": len(self._done)}
        return self._event(f"response.{kind}", **place, **told)

    def _event(self, kind: str, **told: Any) -> bytes:
        numbered = {"type": kind, "sequence_number": self._sequence}
        self._sequence += 1
        return event(msgspec.json.encode(numbered | told), kind.encode())


def _reasoning(step_id: str, at: int, text: str = "") -> Said:
    return Said(f"rs_{step_id}_{at}", "reasoning_text", text)


def _message(step_id: str, at: int, text: str = "") -> Said:
    return Said(f"msg_{step_id}_{at}", "output_text", text)


def _called(step_id: str, at: int, call_id: str, tool: ToolName) -> Called:
    return Called(f"{'ctc' if tool.custom else 'fc'}_{step_id}_{at}", call_id, tool)


def _tool(name: str, names: Mapping[str, ToolName]) -> ToolName:
    """Models also call what nobody offered."""
    return names.get(name) or ToolName(name)


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _response(echo: Echo, step_id: str, created: int, model: str, status: str) -> dict[str, Any]:
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


def _usage(used: Usage) -> dict[str, Any]:
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used.prompt_tokens + used.completion_tokens,
    }
