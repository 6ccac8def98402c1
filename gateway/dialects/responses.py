"""OpenAI's /responses, as Codex and OpenAI's SDKs use it.

The gateway keeps no responses: what refers to an earlier one is refused, and the whole conversation
comes as `input`. Accepted and without effect: store, truncation, service_tier, prompt_cache_key,
parallel_tool_calls, efforts of reasoning other than none, and `include` unless it asks for logprobs.
"""

from typing import Any

import msgspec

from gateway.dialects.chat import chosen_tools
from gateway.dialects.request import Answer, Request, template_messages
from gateway.dialects.responses_body import ResponsesBody, Tools, conversation, openai_choice
from gateway.dialects.responses_stream import Echo, ResponsesWriter, finished, items
from gateway.dialects.sampling import sampling_params
from gateway.errors import BadRequest, decoded

ECHOED = ("temperature", "top_p", "max_output_tokens", "metadata")
LOGPROBS = "message.output_text.logprobs"

_decode = msgspec.json.Decoder(ResponsesBody).decode


class Responses:
    """The dialect."""

    name = "responses"
    body = ResponsesBody

    def parse(self, body: bytes) -> Request:
        asked = decoded(_decode, body)
        _refuse_what_is_not_served(asked)
        shown = Tools.of(asked.tools or [])
        choice = openai_choice(asked.tool_choice)
        return Request(
            messages=template_messages(conversation(asked)),
            tools=chosen_tools(shown.functions, choice),
            tool_choice=choice,
            template=_template(asked),
            sampling=_sampling(asked),
            model=asked.model or "",
            stream=bool(asked.stream),
            include_usage=True,
            echo_of=Echo(shown.names, _echoed(asked)),
        )

    def answer(self, request: Request, answer: Answer) -> bytes:
        output = items(answer, request.echo_of.names)
        return msgspec.json.encode(finished(request.echo_of, answer, output))

    def writer(self, request: Request, step_id: str, created: int, model: str) -> ResponsesWriter:
        return ResponsesWriter(request.echo_of, step_id, created, model)


def _refuse_what_is_not_served(asked: ResponsesBody) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(asked, name) is not None:
            raise BadRequest(
                f"{name} is not served: this gateway keeps no responses; send the whole "
                "conversation as input",
                param=name,
            )
    if asked.background:
        raise BadRequest("background is not served: wait for the answer", param="background")
    if asked.top_logprobs or LOGPROBS in (asked.include or ()):
        raise BadRequest("logprobs are given by /chat/completions only", param="top_logprobs")


def _template(asked: ResponsesBody) -> dict[str, Any]:
    given = asked.chat_template_kwargs or {}
    if asked.reasoning and asked.reasoning.effort == "none":
        return given | {"enable_thinking": False}
    return given


def _sampling(asked: ResponsesBody) -> dict[str, Any]:
    given = sampling_params(asked)
    if asked.max_output_tokens is not None:
        given["max_tokens"] = asked.max_output_tokens
    wanted = asked.text and asked.text.format
    if wanted and wanted.type == "json_object":
        given["structured_outputs"] = {"json_object": True}
    elif wanted and wanted.type == "json_schema":
        if wanted.schema is None:
            raise BadRequest("text.format of type json_schema needs a schema", param="text")
        given["structured_outputs"] = {"json": wanted.schema}
    return given


def _echoed(asked: ResponsesBody) -> dict[str, Any]:
    """What OpenAI repeats of a request; its SDKs demand the first three."""
    required = {
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
    }
    given = {name: value for name in ECHOED if (value := getattr(asked, name)) is not None}
    return required | given
