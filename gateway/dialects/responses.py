"""OpenAI's /responses, as Codex and OpenAI's SDKs use it.

The gateway stores no responses: references to earlier ones are refused, and the whole conversation must
be sent as `input`. Accepted but ignored: store, truncation, service_tier, prompt_cache_key,
and `include` unless it asks for logprobs.
"""

from typing import Any

import msgspec

from gateway.dialects.chat import chosen_tools
from gateway.dialects.chat_messages import template_messages
from gateway.dialects.reasoning import template_variables
from gateway.dialects.request import Answer, Request
from gateway.dialects.responses_body import RequestTools, ResponsesBody, conversation, openai_choice
from gateway.dialects.responses_stream import (
    RequestEcho,
    ResponsesWriter,
    finished_response,
    output_items,
)
from gateway.dialects.sampling import sampling_params
from gateway.errors import BadRequest, decoded

ECHOED = ("temperature", "top_p", "max_output_tokens", "metadata")
LOGPROBS = "message.output_text.logprobs"

_decode = msgspec.json.Decoder(ResponsesBody).decode


class Responses:
    """The dialect of /responses."""

    name = "responses"
    body = ResponsesBody

    def parse(self, body: bytes) -> Request:
        fields = decoded(_decode, body)
        _refuse_unsupported(fields)
        tools = RequestTools.parse(fields.tools or [])
        choice = openai_choice(fields.tool_choice)
        return Request(
            messages=template_messages(conversation(fields)),
            tools=chosen_tools(tools.functions, choice),
            tool_choice=choice,
            single_tool_call=fields.parallel_tool_calls is False,
            template=_template(fields),
            sampling=_sampling(fields),
            model=fields.model or "",
            stream=bool(fields.stream),
            include_usage=True,
            echo_of=RequestEcho(tools.names, _echoed(fields)),
        )

    def answer(self, request: Request, answer: Answer) -> bytes:
        output = output_items(answer, request.echo_of.names)
        return msgspec.json.encode(finished_response(request.echo_of, answer, output))

    def writer(self, request: Request, step_id: str, created: int, model: str) -> ResponsesWriter:
        return ResponsesWriter(request.echo_of, step_id, created, model)


def _refuse_unsupported(body: ResponsesBody) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name) is not None:
            raise BadRequest(
                f"{name} is not supported: this gateway stores no responses. Send the whole "
                "conversation as input.",
                param=name,
            )
    if body.background:
        raise BadRequest(
            "background is not supported. Leave it out and wait for the answer.", param="background"
        )
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        raise BadRequest(
            "/responses returns no logprobs. Use /chat/completions for them.", param="top_logprobs"
        )


def _template(body: ResponsesBody) -> dict[str, Any]:
    effort = body.reasoning.effort if body.reasoning else None
    return template_variables(body.chat_template_kwargs, effort)


def _sampling(body: ResponsesBody) -> dict[str, Any]:
    params = sampling_params(body)
    if body.max_output_tokens is not None:
        params["max_tokens"] = body.max_output_tokens
    format_ = body.text and body.text.format
    if format_ and format_.type == "json_object":
        params["structured_outputs"] = {"json_object": True}
    elif format_ and format_.type == "json_schema":
        if format_.schema is None:
            raise BadRequest("text.format of type json_schema needs a schema.", param="text")
        params["structured_outputs"] = {"json": format_.schema}
    return params


def _echoed(body: ResponsesBody) -> dict[str, Any]:
    """The request fields that OpenAI repeats in a response; its SDKs require the first three."""
    required = {
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
    }
    optional = {name: value for name in ECHOED if (value := getattr(body, name)) is not None}
    return required | optional
