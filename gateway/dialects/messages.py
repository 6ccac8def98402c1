"""Anthropic's /messages and /messages/count_tokens, as Claude Code and Anthropic's SDKs use them.

Accepted but ignored, since they change nothing that the model sees: cache_control, metadata,
context_management, service_tier, and budgets and efforts of thinking. Thinking blocks are signed with
the Step's id, because clients drop blocks without a signature.
"""

from typing import Any

import msgspec

from gateway.dialects.chat import chosen_tools
from gateway.dialects.chat_messages import template_messages
from gateway.dialects.messages_body import (
    INVALID_JSON,
    MessagesBody,
    conversation,
    functions,
    openai_choice,
)
from gateway.dialects.request import (
    Answer,
    AnswerDelta,
    Request,
    ToolCall,
    ToolCallDelta,
    Usage,
    event,
    parse_arguments,
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
ENABLES_THINKING = {"enabled": True, "disabled": False}
"""By the type of `thinking`. Adaptive thinking is left to the template."""

_decode = msgspec.json.Decoder(MessagesBody).decode


class Messages:
    """The dialect of /messages."""

    name = "messages"
    body = MessagesBody

    def parse(self, body: bytes) -> Request:
        message = decoded(_decode, body)
        if message.max_tokens is None:
            raise BadRequest("max_tokens is required.", param="max_tokens")
        if message.messages and message.messages[-1].role == "assistant":
            raise BadRequest(
                "The last message is the assistant's. Prefilled answers are not supported: end with a "
                "user message.",
                param="messages",
            )
        return _request(message)

    def answer(self, request: Request, answer: Answer) -> bytes:  # noqa: ARG002
        fields = {"content": _content(answer), "usage": _usage(answer.usage)} | _stop(answer)
        return msgspec.json.encode(_message(answer.step_id, answer.model) | fields)

    def writer(
        self,
        request: Request,  # noqa: ARG002
        step_id: str,
        created: int,  # noqa: ARG002
        model: str,
    ) -> "MessagesWriter":
        return MessagesWriter(step_id, model)


def parse_count_tokens(body: bytes) -> Request:
    """The request whose prompt is counted."""
    return _request(decoded(_decode, body))


def anthropic_error(error: ApiError) -> bytes:
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    return _error(str(error), ERROR_TYPES.get(error.status, other))


def _error(message: str, kind: str) -> bytes:
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def _request(body: MessagesBody) -> Request:
    if not body.messages:
        raise BadRequest("messages must not be empty.", param="messages")
    choice = openai_choice(body.tool_choice)
    return Request(
        messages=template_messages(list(conversation(body))),
        tools=chosen_tools(functions(body.tools or []), choice),
        tool_choice=choice,
        single_tool_call=bool(body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        template=_template(body),
        sampling=_sampling(body),
        model=body.model or "",
        stream=bool(body.stream),
        include_usage=True,
    )


def _template(body: MessagesBody) -> dict[str, Any]:
    variables = body.chat_template_kwargs or {}
    thinking = ENABLES_THINKING.get(body.thinking.type) if body.thinking else None
    return variables if thinking is None else variables | {"enable_thinking": thinking}


def _sampling(body: MessagesBody) -> dict[str, Any]:
    body.stop = body.stop_sequences or body.stop
    params = sampling_params(body)
    if format_ := (body.output_config and body.output_config.format) or body.output_format:
        params["structured_outputs"] = {"json": format_.schema}
    return params


class MessagesWriter:
    """One streamed message. A content block stays open until a delta of another kind arrives."""

    def __init__(self, step_id: str, model: str) -> None:
        self._step_id = step_id
        self._model = model
        self._index = -1
        self._open: tuple[str, int] | None = None

    def begin(self) -> bytes:
        # The prompt's length is sent with the end: clients use the later number.
        no_usage = _usage(Usage(prompt_tokens=0, completion_tokens=0))
        message = _message(self._step_id, self._model) | {"content": [], "usage": no_usage}
        message |= {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=message)

    def delta(self, delta: AnswerDelta) -> bytes:
        # A delta that ends one call and begins another may also have the text between them.
        continued = [call for call in delta.tool_calls if self._open == ("tool_use", call.index)]
        new = [call for call in delta.tool_calls if call not in continued]
        events = b"".join(self._call(call) for call in continued)
        if delta.reasoning:
            events += self._open_block(("thinking", 0), _thinking("", ""))
            events += self._delta_event("thinking_delta", thinking=delta.reasoning)
        if delta.content:
            events += self._open_block(("text", 0), _text(""))
            events += self._delta_event("text_delta", text=delta.content)
        return events + b"".join(self._call(call) for call in new)

    def end(self, answer: Answer) -> bytes:
        last_delta = _event("message_delta", delta=_stop(answer), usage=_usage(answer.usage))
        return self._close() + last_delta + _event("message_stop")

    def error(self, message: str, kind: str) -> bytes:
        return event(_error(message, "api_error" if kind == "server_error" else kind), b"error")

    def _call(self, call: ToolCallDelta) -> bytes:
        events = self._open_block(
            ("tool_use", call.index), _tool_use(call.id or "", call.name or "", {})
        )
        if call.arguments:
            events += self._delta_event("input_json_delta", partial_json=call.arguments)
        return events

    def _open_block(self, key: tuple[str, int], block: dict[str, Any]) -> bytes:
        if self._open == key:
            return b""
        closed = self._close()
        self._open = key
        self._index += 1
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _delta_event(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind} | fields)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        is_thinking = self._open[0] == "thinking"
        self._open = None
        signature = b""
        if is_thinking:
            signature = self._delta_event("signature_delta", signature=self._step_id)
        return signature + _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> bytes:
    return event(msgspec.json.encode({"type": kind} | fields), kind.encode())


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
    arguments = parse_arguments(call.arguments)
    return arguments if isinstance(arguments, dict) else {INVALID_JSON: call.arguments}


def _stop(answer: Answer) -> dict[str, str | None]:
    if answer.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answer.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "end_turn" if answer.stop_sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_sequence}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
