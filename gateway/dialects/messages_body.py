"""The body of Anthropic's /messages, converted to messages for the chat template.

An answer that a client sends back must become `Answer.message()` again, or the next call does not
continue the Step. So an assistant's text blocks are concatenated without a separator, as they were cut
from one text, and all its tool_use blocks are calls of one message.
"""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from gateway.dialects.attachments import omitted_text
from gateway.dialects.request import Message, Tool
from gateway.dialects.sampling import SamplingBody
from gateway.errors import BadRequest

INVALID_JSON = "INVALID_JSON"
"""Anthropic's own key for arguments that are not an object, wrapped into one."""
BILLING = "x-anthropic-billing-header"
"""Claude Code prepends a system block that begins with this and differs in every request; with it, no
two prompts would share a prefix."""
TOOL_SEARCH = "tool_search_tool_"
"""Type prefix of tools that search tools with defer_loading. The template shows every tool, so there is
nothing to search."""


class Text(msgspec.Struct, tag="text"):
    text: str


class Source(msgspec.Struct):
    media_type: str | None = None


class Image(msgspec.Struct, tag="image"):
    source: Source | None = None


class Document(msgspec.Struct, tag="document"):
    source: Source | None = None


class ToolReference(msgspec.Struct, tag="tool_reference"):
    tool_name: str


class ToolUse(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] | None = None


class ToolResult(msgspec.Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[Text | Image | Document | ToolReference] | None = None
    is_error: bool | None = None


class Thinking(msgspec.Struct, tag="thinking"):
    thinking: str


class RedactedThinking(msgspec.Struct, tag="redacted_thinking"):
    pass


Block = Text | Image | Document | ToolUse | ToolResult | Thinking | RedactedThinking


class Turn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolBody(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct):
    type: str


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    format: OutputFormat | None = None


class MessagesBody(SamplingBody, kw_only=True):
    """Anthropic's fields; those of `SamplingBody` that Anthropic lacks are vLLM's additions."""

    messages: list[Turn]
    model: str | None = None
    system: str | list[Text] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    stop_sequences: list[str] | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older place of output_config.format."""
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def conversation(body: MessagesBody) -> Iterator[Message]:
    """The body's messages, for the chat template."""
    if system := _system(body.system):
        yield {"role": "system", "content": system}
    for at, turn in enumerate(body.messages):
        if isinstance(turn.content, str):
            yield {"role": turn.role, "content": turn.content}
        elif turn.role == "assistant":
            yield _assistant(turn.content, at)
        else:
            yield from _user_messages(turn.role, turn.content, at)


def _system(system: str | list[Text] | None) -> str:
    blocks = [Text(system)] if isinstance(system, str) else system or []
    return "\n".join(block.text for block in blocks if not block.text.startswith(BILLING))


def _assistant(blocks: list[Block], at: int) -> Message:
    """An answer that the client sends back, or made up."""
    text, thinking, calls = "", "", []
    for block in blocks:
        match block:
            case Text():
                text += block.text
            case Thinking():
                thinking += block.thinking
            case RedactedThinking():
                pass
            case ToolUse():
                calls.append(_call(block))
            case _:
                raise _unsupported(block, f"messages[{at}] of the assistant")
    message: Message = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: ToolUse) -> dict[str, Any]:
    arguments: Any = block.input or {}
    if isinstance(arguments.get(INVALID_JSON), str) and len(arguments) == 1:
        arguments = arguments[INVALID_JSON]
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _user_messages(role: str, blocks: list[Block], at: int) -> Iterator[Message]:
    """One turn with tool results and text becomes several messages, the results first."""
    texts = []
    for block in blocks:
        match block:
            case Text():
                texts.append(block.text)
            case ToolResult():
                yield _result(block)
            case _:
                raise _unsupported(block, f"messages[{at}] of the {role}")
    if texts or not blocks:
        yield {"role": role, "content": "\n".join(texts)}


def _result(block: ToolResult) -> Message:
    parts = [Text(block.content)] if isinstance(block.content, str) else block.content or []
    text = "\n".join(map(_result_text, parts))
    # Chat templates have no field for the flag, but the model should see it.
    content = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _result_text(part: Text | Image | Document | ToolReference) -> str:
    match part:
        case Text():
            return part.text
        case ToolReference():
            return part.tool_name
        case Image() | Document():
            kind = "image" if isinstance(part, Image) else "document"
            return omitted_text(kind, part.source and part.source.media_type)


def _unsupported(block: msgspec.Struct, location: str) -> BadRequest:
    kind = block.__struct_config__.tag
    return BadRequest(
        f"{location} has a block of type {kind}, which is not supported there. Supported are text, "
        "tool_use and thinking from the assistant, and text and tool_result from the user.",
        param="messages",
    )


def functions(tools: list[ToolBody]) -> list[Tool]:
    """The tools in OpenAI's shape."""
    kept = [tool for tool in tools if not (tool.type or "").startswith(TOOL_SEARCH)]
    return [_function(tool) for tool in kept]


def _function(tool: ToolBody) -> Tool:
    if tool.type not in (None, "custom") or tool.input_schema is None:
        raise BadRequest(
            f"The tool {tool.name!r} has no input_schema. Tools that are built into Anthropic's models "
            "or servers are not supported; describe the tool with an input_schema.",
            param="tools",
        )
    function = {"name": tool.name, "description": tool.description or ""}
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


def openai_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    """tool_choice in OpenAI's shape."""
    if choice is None:
        return None
    named = {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}.get(choice.type, named)
