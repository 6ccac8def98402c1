"""A call as the gateway sees it, whatever API it came by.

Each dialect (`chat`, `completions`, `messages`, `responses`) turns its body into a `Request` and an
`Answer` into its own JSON or events. Between the two nothing knows which API the client speaks.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

from gateway.errors import BadRequest

Message = dict[str, Any]
"""In OpenAI's shape, as chat templates take it: content is text, arguments are objects."""
Tool = dict[str, Any]

ROLES = {"system", "user", "assistant", "tool"}
NEUTRAL: Mapping[str, Any] = {
    "temperature": 1,
    "top_p": 1,
    "top_k": (0, -1),
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "logit_bias": {},
    "allowed_token_ids": [],
    "bad_words": [],
    "structured_outputs": None,
}
"""Settings that leave the model's distribution alone."""
HARMLESS = {"temperature"}
"""The engine's logprobs account for it: they are those after the temperature."""


class Request(msgspec.Struct, kw_only=True, gc=False):
    """What to generate. `messages` are rendered with the chat template, unless there is a `prompt`."""

    messages: list[Message] = []
    tools: list[Tool] | None = None
    tool_choice: Any = None
    """In OpenAI's shape."""
    template: dict[str, Any] = {}
    """Variables for the chat template, such as enable_thinking."""
    prompt: str | list[int] | None = None
    sampling: dict[str, Any] = {}
    """Fields of the engine's SamplingParams that the client set."""
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    token_ids: bool = False
    """The client asked for the ids of prompt and response."""
    echo_of: Any = None
    """What a dialect needs of its own body to write the answer."""

    @property
    def forces_tool(self) -> bool:
        return bool(self.tools) and self.tool_choice not in (None, "auto", "none")

    def __post_init__(self) -> None:
        temperature = self.sampling.get("temperature")
        if temperature is not None and temperature < 0:
            raise BadRequest("temperature must not be negative", param="temperature")


def not_trainable(sampling: Mapping[str, Any], forced: bool = False) -> str | None:
    """Why logprobs sampled with these settings say little about the model; None if they are good."""
    if forced:
        return "the distribution was changed by tool_choice"
    if sampling.get("temperature") == 0:
        return "greedy decoding: temperature is 0"
    changed = [
        name
        for name, neutral in NEUTRAL.items()
        if name in sampling and name not in HARMLESS and not _is_neutral(sampling[name], neutral)
    ]
    return f"the distribution was changed by {', '.join(changed)}" if changed else None


def _is_neutral(value: Any, neutral: Any) -> bool:
    return value is None or (value in neutral if isinstance(neutral, tuple) else value == neutral)


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    name: str
    arguments: str
    """A JSON text, as OpenAI has it."""


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int


class TokenLogprob(msgspec.Struct, kw_only=True):
    id: int
    token: str
    logprob: float
    top: list["TokenLogprob"] = []


class Answer(msgspec.Struct, kw_only=True):
    """A finished call, whether it was just generated or is rebuilt from its Step."""

    step_id: str
    created: int
    model: str
    content: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    finish_reason: str
    """stop, length or tool_calls."""
    stop_sequence: str | None = None
    """The client's stop string that ended it."""
    usage: Usage
    logprobs: list[TokenLogprob] = []
    prompt_ids: list[int] = []
    token_ids: list[int] = []

    def message(self) -> Message:
        """As the client will send it back in its next call."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": parsed(call.arguments)}}
                for call in self.tool_calls
            ]
        return message


class ToolCallDelta(msgspec.Struct, kw_only=True):
    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Delta(msgspec.Struct, kw_only=True):
    """What a stream brought since the last one."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []
    logprobs: list[TokenLogprob] = []
    token_ids: list[int] = []


class StreamWriter(Protocol):
    """Writes one streamed answer as server-sent events. `end` comes after the Step is in the log."""

    def begin(self) -> bytes: ...
    def delta(self, delta: Delta) -> bytes: ...
    def end(self, answer: Answer) -> bytes: ...
    def error(self, message: str, kind: str) -> bytes: ...


class Dialect(Protocol):
    """One API: `name` labels its metrics."""

    name: str

    def parse(self, body: bytes) -> Request: ...
    def answer(self, request: Request, answer: Answer) -> bytes: ...
    def writer(self, request: Request, step_id: str, created: int, model: str) -> StreamWriter: ...


def event(data: bytes, name: bytes = b"") -> bytes:
    """One server-sent event."""
    return (b"event: " + name + b"\n" if name else b"") + b"data: " + data + b"\n\n"


def template_messages(messages: list[Message]) -> list[Message]:
    """Messages as chat templates take them; a clear refusal of what is not text."""
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    return [_template_message(message, at) for at, message in enumerate(messages)]


def _template_message(message: Message, at: int) -> Message:
    role = message.get("role")
    role = "system" if role == "developer" else role
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(
            f"messages[{at}].role must be one of {', '.join(sorted(ROLES))}", param="messages"
        )
    clean = {name: value for name, value in message.items() if value is not None}
    clean["role"] = role
    clean["content"] = text_of(message.get("content"), at)
    if "tool_calls" in clean:
        clean["tool_calls"] = list(_template_calls(clean["tool_calls"], at))
    return clean


def text_of(content: Any, at: int) -> str:
    """A message's text; parts are joined as vLLM joins them."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"messages[{at}].content must be text or a list", param="messages")
    return "\n".join(_part_text(part, at) for part in content)


def _part_text(part: Any, at: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
        raise BadRequest(
            f"messages[{at}].content has a part of type {kind!r}; this gateway takes text only",
            param="messages",
        )
    return text


def _template_calls(calls: Any, at: int) -> Iterator[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRequest(f"messages[{at}].tool_calls must be a list", param="messages")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(
                f"messages[{at}].tool_calls needs a function with a name", param="messages"
            )
        yield call | {"function": function | {"arguments": parsed(function.get("arguments"))}}


def parsed(arguments: Any) -> Any:
    """Arguments as the object that templates expect; text that is no JSON stays what it is."""
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    if not arguments.strip():
        return {}  # a call without arguments, in some tool parsers' words
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
