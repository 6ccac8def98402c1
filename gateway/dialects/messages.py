"""Anthropic's /messages and /messages/count_tokens, as Claude Code and Anthropic's SDKs use them.

Accepted and without effect, since they change nothing that the model sees: cache_control, metadata,
context_management, service_tier, budgets and efforts of thinking. Thinking blocks are signed with
the Step's id: clients drop blocks without a signature.
"""

from typing import Any

import msgspec

from gateway.dialects.chat import chosen_tools
from gateway.dialects.messages_body import (
    INVALID_JSON,
    MessagesBody,
    conversation,
    functions,
    openai_choice,
)
from gateway.dialects.request import (
    Answer,
    Delta,
    Request,
    ToolCall,
    ToolCallDelta,
    Usage,
    event,
    parsed,
    template_messages,
)
from gateway.dialects.sampling import sampling_params
from gateway.errors import ApiError, BadRequest, decoded

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
THINKS = {"enabled": True, "disabled": False}
"""Adaptive thinking is left to the template."""

_decode = msgspec.json.Decoder(MessagesBody).decode


class Messages:
    """The dialect."""

    name = "messages"
    body = MessagesBody

    def parse(self, body: bytes) -> Request:
        asked = decoded(_decode, body)
        if asked.max_tokens is None:
            raise BadRequest("max_tokens is required", param="max_tokens")
        if asked.messages and asked.messages[-1].role == "assistant":
            raise BadRequest(
                "the last message is the assistant's: an answer begun by the client is not served",
                param="messages",
            )
        return _request(asked)

    def answer(self, request: Request, answer: Answer) -> bytes:  # noqa: ARG002
        ended = {"content": _content(answer), "usage": _usage(answer.usage)} | _stop(answer)
        return msgspec.json.encode(_message(answer.step_id, answer.model) | ended)

    def writer(
        self,
        request: Request,  # noqa: ARG002
        step_id: str,
        created: int,  # noqa: ARG002
        model: str,
    ) -> "MessagesWriter":
        return MessagesWriter(step_id, model)


def count_tokens_request(body: bytes) -> Request:
    """The request whose prompt is to be counted."""
    return _request(decoded(_decode, body))


def count_tokens_answer(input_tokens: int) -> bytes:
    return msgspec.json.encode({"input_tokens": input_tokens})


def anthropic_error(error: ApiError) -> bytes:
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    return _error(str(error), ERROR_TYPES.get(error.status, other))


def _error(message: str, kind: str) -> bytes:
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def _request(asked: MessagesBody) -> Request:
    if not asked.messages:
        raise BadRequest("messages must not be empty", param="messages")
    choice = openai_choice(asked.tool_choice)
    return Request(
        messages=template_messages(list(conversation(asked))),
        tools=chosen_tools(functions(asked.tools or []), choice),
        tool_choice=choice,
        template=_template(asked),
        sampling=_sampling(asked),
        model=asked.model or "",
        stream=bool(asked.stream),
        include_usage=True,
    )


def _template(asked: MessagesBody) -> dict[str, Any]:
    given = asked.chat_template_kwargs or {}
    thinks = THINKS.get(asked.thinking.type) if asked.thinking else None
    return given if thinks is None else given | {"enable_thinking": thinks}


def _sampling(asked: MessagesBody) -> dict[str, Any]:
    asked.stop = asked.stop_sequences or asked.stop
    given = sampling_params(asked)
    if wanted := (asked.output_config and asked.output_config.format) or asked.output_format:
        given["structured_outputs"] = {"json": wanted.schema}
    return given


class MessagesWriter:
    """One streamed message. A block is open until a delta of another kind comes."""

    def __init__(self, step_id: str, model: str) -> None:
        self._step_id = step_id
        self._model = model
        self._index = -1
        self._open: tuple[str, int] | None = None

    def begin(self) -> bytes:
        # How long the prompt is comes with the end: clients take the later number.
        nothing = _usage(Usage(prompt_tokens=0, completion_tokens=0))
        message = _message(self._step_id, self._model) | {"content": [], "usage": nothing}
        message |= {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=message)

    def delta(self, delta: Delta) -> bytes:
        # A part that ends one call and begins another may hold the text between them.
        going_on = [call for call in delta.tool_calls if self._open == ("tool_use", call.index)]
        begun = [call for call in delta.tool_calls if call not in going_on]
        events = b"".join(self._call(call) for call in going_on)
        if delta.reasoning:
            events += self._block(("thinking", 0), _thinking("", ""))
            events += self._told("thinking_delta", thinking=delta.reasoning)
        if delta.content:
            events += self._block(("text", 0), _text(""))
            events += self._told("text_delta", text=delta.content)
        return events + b"".join(self._call(call) for call in begun)

    def end(self, answer: Answer) -> bytes:
        told = _event("message_delta", delta=_stop(answer), usage=_usage(answer.usage))
        return self._close() + told + _event("message_stop")

    def error(self, message: str, kind: str) -> bytes:
        return event(_error(message, "api_error" if kind == "server_error" else kind), b"error")

    def _call(self, call: ToolCallDelta) -> bytes:
        events = self._block(
            ("tool_use", call.index), _tool_use(call.id or "", call.name or "", {})
        )
        if call.arguments:
            events += self._told("input_json_delta", partial_json=call.arguments)
        return events

    def _block(self, wanted: tuple[str, int], block: dict[str, Any]) -> bytes:
        if self._open == wanted:
            return b""
        closed = self._close()
        self._open = wanted
        self._index += 1
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _told(self, kind: str, **told: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind} | told)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        thinking = self._open[0] == "thinking"
        self._open = None
        signed = self._told("signature_delta", signature=self._step_id) if thinking else b""
        return signed + _event("content_block_stop", index=self._index)


def _event(kind: str, **told: Any) -> bytes:
    return event(msgspec.json.encode({"type": kind} | told), kind.encode())


def _message(step_id: str, model: str) -> dict[str, Any]:
    return {"id": f"msg_{step_id}", "type": "message", "role": "assistant", "model": model}


def _content(answer: Answer) -> list[dict[str, Any]]:
    thinking = [_thinking(answer.reasoning, answer.step_id)] if answer.reasoning else []
    text = [_text(answer.content)] if answer.content else []
    calls = [_tool_use(call.id, call.name, _input(call)) for call in answer.tool_calls]
    return [*thinking, *text, *calls]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thinking(thinking: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def _tool_use(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _input(call: ToolCall) -> dict[str, Any]:
    arguments = parsed(call.arguments)
    return arguments if isinstance(arguments, dict) else {INVALID_JSON: call.arguments}


def _stop(answer: Answer) -> dict[str, str | None]:
    if answer.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answer.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "end_turn" if answer.stop_sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_sequence}


def _usage(used: Usage) -> dict[str, int]:
    return {
        "input_tokens": used.prompt_tokens,
        "output_tokens": used.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
