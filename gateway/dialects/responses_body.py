"""The body of OpenAI's /responses, converted to messages for the chat template.

The items of one answer must become one assistant message again, `Answer.message()`, or the next
call does not continue the Step: successive reasoning, text and calls are joined until an item of
another role. Reasoning begins a new answer, and so does a text directly after a text.

Tools: a `function` stays as it is. A function in a `namespace` gets the namespace as a prefix of
its name. A `custom` tool becomes a function with one string, `input`. `web_search`, `tool_search`
and `image_generation` are dropped: OpenAI's servers run them, and Codex sends them by default. Any
other type is refused."""

import functools
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from gateway.dialects.attachments import KINDS, omitted_text
from gateway.dialects.request import Message, Tool
from gateway.dialects.sampling import Positive, SamplingBody
from gateway.errors import BadRequest, decoded

SKIPPED_TOOLS = ("web_search", "tool_search", "image_generation")
"""Prefixes of their types: OpenAI appends dates to some."""
TEXT_PARTS = {"input_text", "output_text", "text", "summary_text", "reasoning_text"}
INPUT_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's input, as it is."}},
    "required": ["input"],
}


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_data: str | None = None


class MessageItem(msgspec.Struct, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]


class ReasoningItem(msgspec.Struct, tag="reasoning"):
    summary: list[ContentPart] | None = None
    content: list[ContentPart] | None = None


class FunctionCall(msgspec.Struct, tag="function_call"):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCall(msgspec.Struct, tag="custom_tool_call"):
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class FunctionOutput(msgspec.Struct, tag="function_call_output"):
    output: str | list[ContentPart]
    call_id: str | None = None


class CustomOutput(FunctionOutput, tag="custom_tool_call_output"):
    pass


Item = MessageItem | ReasoningItem | FunctionCall | CustomCall | FunctionOutput | CustomOutput


class Items(msgspec.Struct):
    """A struct of its own, so that an error names the position in `input`."""

    input: list[Item]


class Reasoning(msgspec.Struct):
    effort: str | None = None


class Format(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None


class TextConfig(msgspec.Struct):
    format: Format | None = None


class ResponsesBody(SamplingBody, kw_only=True):
    """OpenAI's fields; those of `SamplingBody` that this route lacks are vLLM's additions."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Positive | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_items = functools.partial(msgspec.convert, type=Items)


def conversation(body: ResponsesBody) -> list[Message]:
    """The body's items as messages for the chat template."""
    messages: list[Message] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    # Clients may leave out the type of plain messages.
    typed = [item if item.get("type") else item | {"type": "message"} for item in body.input]
    for at, item in enumerate(decoded(_items, {"input": typed}).input):
        _add(messages, item, at)
    return messages


def _add(messages: list[Message], item: Item, at: int) -> None:
    match item:
        case ReasoningItem():
            if reasoning := "".join(_texts(item.content or item.summary or [], at)):
                _answer(messages, continues=False)["reasoning_content"] = reasoning
        case MessageItem(role="assistant"):
            last = messages[-1] if messages else {}
            message = _answer(messages, continues=not last.get("content") or "tool_calls" in last)
            message["content"] += "".join(_texts(item.content, at))
        case FunctionCall() | CustomCall():
            message = _answer(messages, continues=True)
            message.setdefault("tool_calls", []).append(_call(item))
        case MessageItem():
            _add_non_assistant(messages, item.role, "\n".join(_texts(item.content, at)))
        case FunctionOutput():
            content = "\n".join(_output_texts(item.output, at))
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})


def _answer(messages: list[Message], *, continues: bool) -> Message:
    """The assistant message that an item belongs to; a new one unless it continues the last."""
    if not (continues and messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_non_assistant(messages: list[Message], role: str, text: str) -> None:
    """Merges system messages: Codex sends both instructions and a developer message, and many templates
    accept only one."""
    is_system = role in ("system", "developer")
    if is_system and len(messages) == 1 and messages[0]["role"] == "system":
        messages[0]["content"] += f"\n\n{text}"
    else:
        messages.append({"role": "system" if is_system else role, "content": text})


def _texts(content: str | list[ContentPart], at: int) -> Iterator[str]:
    for part in [ContentPart("text", content)] if isinstance(content, str) else content:
        if part.type not in TEXT_PARTS and part.refusal is None:
            raise BadRequest(
                f"input[{at}] has a part of type {part.type!r}. This gateway accepts text only.",
                param="input",
            )
        yield part.text or part.refusal or ""


def _output_texts(output: str | list[ContentPart], at: int) -> Iterator[str]:
    """The texts of a tool's result, and what stands for its images and files."""
    for part in [ContentPart("text", output)] if isinstance(output, str) else output:
        if part.type in KINDS:
            yield omitted_text(part.type, part.image_url or part.file_data)
        else:
            yield from _texts([part], at)


def _call(item: FunctionCall | CustomCall) -> dict[str, Any]:
    arguments = item.arguments if isinstance(item, FunctionCall) else {"input": item.input}
    function = {"name": flat_name(item.namespace, item.name), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def flat_name(namespace: str | None, name: str) -> str:
    """A function's name for the template. MCP's namespaces already end in the separator."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


class ToolName(msgspec.Struct, frozen=True):
    """A tool's name as the client knows it."""

    name: str
    namespace: str | None = None
    custom: bool = False


class RequestTools(msgspec.Struct):
    """The functions that the template shows, and the client's tools by their function's name."""

    functions: list[Tool] = []
    names: dict[str, ToolName] = {}

    @classmethod
    def parse(cls, tools: list[dict[str, Any]]) -> "RequestTools":
        parsed = cls([], {})
        for at, tool in enumerate(tools):
            parsed._add(tool, None, f"tools[{at}]")
        return parsed

    def _add(self, tool: Any, namespace: str | None, location: str) -> None:
        kind, name = (tool.get("type"), tool.get("name")) if isinstance(tool, dict) else ("", "")
        if isinstance(kind, str) and kind.startswith(SKIPPED_TOOLS):
            return
        if kind == "namespace" and isinstance(name, str) and namespace is None:
            self._add_all(tool.get("tools"), name, location)
        elif kind in ("function", "custom") and isinstance(name, str):
            flat = flat_name(namespace, name)
            self.names[flat] = ToolName(name, namespace, kind == "custom")
            self.functions.append({"type": "function", "function": _function(tool, flat)})
        else:
            raise BadRequest(
                f"{location} must have a name and be of type function, custom or namespace. Tools that "
                "OpenAI hosts are not supported.",
                param="tools",
            )

    def _add_all(self, tools: Any, namespace: str, location: str) -> None:
        if not isinstance(tools, list):
            raise BadRequest(f"{location} is a namespace and needs a list of tools.", param="tools")
        for at, tool in enumerate(tools):
            self._add(tool, namespace, f"{location}.tools[{at}]")


def _function(tool: dict[str, Any], name: str) -> dict[str, Any]:
    description = str(tool.get("description") or "")
    if tool["type"] == "function":
        parameters = tool.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict):
            raise BadRequest(f"the parameters of {name} must be a JSON schema", param="tools")
        return {"name": name, "description": description, "parameters": parameters}
    # A grammar cannot be enforced inside the JSON of a call, but the model can read it.
    grammar = tool.get("format")
    definition = grammar.get("definition") if isinstance(grammar, dict) else None
    if isinstance(definition, str):
        description = f"{description}\n\nThe input follows this grammar:\n{definition}"
    return {"name": name, "description": description, "parameters": INPUT_SCHEMA}


def openai_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """tool_choice in the shape of chat completions."""
    if not isinstance(choice, dict):
        return choice
    namespace, name = choice.get("namespace"), choice.get("name")
    if choice.get("type") not in ("function", "custom") or not isinstance(name, str):
        raise BadRequest(
            "tool_choice must be none, auto, required, or name one function or custom tool.",
            param="tool_choice",
        )
    flat = flat_name(namespace if isinstance(namespace, str) else None, name)
    return {"type": "function", "function": {"name": flat}}
