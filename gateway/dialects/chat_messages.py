"""Chat messages in the shape that chat templates take: text content, arguments as objects."""

from collections.abc import Iterator
from typing import Any

from gateway.dialects.attachments import KINDS, omitted_text
from gateway.dialects.request import Message, parse_arguments
from gateway.errors import BadRequest

ROLES = {"system", "user", "assistant", "tool"}


def template_messages(messages: list[Message]) -> list[Message]:
    """Converts a request's messages. Content that is not text is refused, except in tool results."""
    if not messages:
        raise BadRequest("messages must not be empty.", param="messages")
    return [_template_message(message, at) for at, message in enumerate(messages)]


def _template_message(message: Message, at: int) -> Message:
    role = message.get("role")
    role = "system" if role == "developer" else role
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(
            f"messages[{at}].role must be one of {', '.join(sorted(ROLES))}.", param="messages"
        )
    if message.get("function_call") is not None:
        raise BadRequest(
            f"messages[{at}].function_call is not supported. Send it as tool_calls.",
            param="messages",
        )
    converted = {name: value for name, value in message.items() if value is not None}
    converted["role"] = role
    converted["content"] = _content_text(message.get("content"), at, is_result=role == "tool")
    if "tool_calls" in converted:
        converted["tool_calls"] = list(_template_calls(converted["tool_calls"], at))
    return converted


def _content_text(content: Any, at: int, is_result: bool) -> str:
    """A message's text; parts are joined with line breaks, as vLLM does."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(
            f"messages[{at}].content must be a string or a list of parts.", param="messages"
        )
    return "\n".join(_part_text(part, at, is_result) for part in content)


def _part_text(part: Any, at: int, is_result: bool) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if is_result and isinstance(kind, str) and kind in KINDS:
        return omitted_text(kind, _data_url(part.get(kind)))
    text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
        raise BadRequest(
            f"messages[{at}].content has a part of type {kind!r}. This gateway accepts text only.",
            param="messages",
        )
    return text


def _data_url(source: Any) -> Any:
    """Where the data of a part is: OpenAI nests it in an object, some clients do not."""
    return source.get("url", source.get("file_data")) if isinstance(source, dict) else source


def _template_calls(calls: Any, at: int) -> Iterator[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRequest(f"messages[{at}].tool_calls must be a list.", param="messages")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(
                f"Every entry of messages[{at}].tool_calls needs a function with a name.",
                param="messages",
            )
        yield call | {
            "function": function | {"arguments": parse_arguments(function.get("arguments"))}
        }
