"""OpenAI's /chat/completions."""

from typing import Any, Literal

import msgspec

from gateway.dialects.chat_messages import template_messages
from gateway.dialects.reasoning import template_variables
from gateway.dialects.refused_fields import RefusingBody, refuse_fields
from gateway.dialects.request import (
    Answer,
    AnswerDelta,
    Request,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
    event,
)
from gateway.dialects.sampling import Natural, Positive, sampling_params
from gateway.errors import BadRequest, decoded

DONE = event(b"[DONE]")
MAX_TOP_LOGPROBS = 20


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChatBody(RefusingBody, kw_only=True):
    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Natural | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None


_decode = msgspec.json.Decoder(ChatBody).decode


class Chat:
    """The dialect of /chat/completions."""

    name = "chat"
    body = ChatBody

    def parse(self, body: bytes) -> Request:
        chat = decoded(_decode, body)
        refuse_fields(chat)
        if (chat.top_logprobs or 0) > MAX_TOP_LOGPROBS:
            raise BadRequest(
                f"top_logprobs must be at most {MAX_TOP_LOGPROBS}.", param="top_logprobs"
            )
        sampling = sampling_params(chat)
        if chat.max_completion_tokens is not None:
            sampling["max_tokens"] = chat.max_completion_tokens
        return Request(
            messages=template_messages(chat.messages),
            tools=chosen_tools(chat.tools, chat.tool_choice),
            tool_choice=chat.tool_choice,
            single_tool_call=chat.parallel_tool_calls is False,
            template=template_variables(chat.chat_template_kwargs, chat.reasoning_effort),
            sampling=sampling,
            model=chat.model or "",
            stream=bool(chat.stream),
            include_usage=bool(chat.stream_options and chat.stream_options.include_usage),
            logprobs=bool(chat.logprobs),
            top_logprobs=chat.top_logprobs or 0,
            token_ids=bool(chat.return_token_ids),
        )

    def answer(self, request: Request, answer: Answer) -> bytes:
        choice: dict[str, Any] = {
            "index": 0,
            "message": _message(answer),
            "logprobs": _logprobs(answer.logprobs) if request.logprobs else None,
            "finish_reason": answer.finish_reason,
        }
        body = {
            "id": f"chatcmpl-{answer.step_id}",
            "object": "chat.completion",
            "created": answer.created,
            "model": answer.model,
            "system_fingerprint": answer.versions,
            "choices": [choice],
            "usage": usage_body(answer.usage),
        }
        if request.token_ids:
            choice["token_ids"] = answer.token_ids
            body["prompt_token_ids"] = answer.prompt_ids
        return msgspec.json.encode(body)

    def writer(self, request: Request, step_id: str, created: int, model: str) -> "ChatWriter":
        return ChatWriter(request, step_id, created, model)


class ChatWriter:
    """One streamed chat completion."""

    def __init__(self, request: Request, step_id: str, created: int, model: str) -> None:
        self._request = request
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{step_id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: AnswerDelta) -> bytes:
        fields: dict[str, Any] = {}
        if delta.content:
            fields["content"] = delta.content
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            fields["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        return self._chunk(fields, delta)

    def end(self, answer: Answer) -> bytes:
        self._head["system_fingerprint"] = answer.versions
        if self._request.token_ids:
            self._head["prompt_token_ids"] = answer.prompt_ids
        events = self._chunk({}, finish_reason=answer.finish_reason)
        if self._request.include_usage:
            last = self._head | {"choices": [], "usage": usage_body(answer.usage)}
            events += event(msgspec.json.encode(last))
        return events + DONE

    def error(self, message: str, kind: str) -> bytes:
        error = {"message": message, "type": kind, "param": None, "code": None}
        return event(msgspec.json.encode({"error": error}))

    def _chunk(
        self,
        fields: dict[str, Any],
        delta: AnswerDelta | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": fields, "finish_reason": finish_reason}
        if self._request.logprobs:
            choice["logprobs"] = _logprobs(delta.logprobs) if delta else None
        if self._request.token_ids and delta:
            choice["token_ids"] = delta.token_ids
        return event(msgspec.json.encode(self._head | {"choices": [choice]}))


def chosen_tools(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> list[dict[str, Any]] | None:
    """The tools that the template shows. The engine enforces a forced choice."""
    names = {_function(tool, at)["name"] for at, tool in enumerate(tools or [])}
    if choice == "none":
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    is_valid = bool(names) if choice == "required" else choice in (None, "auto") or name in names
    if not is_valid:
        raise BadRequest(
            "tool_choice must be none, auto, required (with tools), or name one of the tools.",
            param="tool_choice",
        )
    return tools or None


def _function(tool: dict[str, Any], at: int) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"tools[{at}] needs a function with a name.", param="tools")
    return function


def usage_body(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [_call(call) for call in answer.tool_calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    body: dict[str, Any] = {"index": call.index, "function": {"arguments": call.arguments}}
    if call.name is not None:
        body |= {"id": call.id, "type": "function"}
        body["function"]["name"] = call.name
    return body


def _logprobs(tokens: list[TokenLogprob]) -> dict[Literal["content"], list[dict[str, Any]]]:
    return {
        "content": [
            _logprob(token) | {"top_logprobs": [_logprob(other) for other in token.top]}
            for token in tokens
        ]
    }


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.token,
        "logprob": token.logprob,
        "bytes": list(token.token.encode("utf-8", "replace")),
    }
