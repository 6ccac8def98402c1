"""A call's request and answer, independent of the API that the client uses.

Each dialect (`chat`, `completions`, `messages`, `responses`) turns a body into a `Request`, and an
`Answer` into its own JSON or events. Everything in between does not know which API it is.
"""

from typing import Any, Protocol

import msgspec

from gateway.errors import BadRequest
from pool.core.sampling import LOWEST_TEMPERATURE

Message = dict[str, Any]
"""A chat message in OpenAI's shape, as chat templates take it: text content, arguments as objects."""
Tool = dict[str, Any]


class Request(msgspec.Struct, kw_only=True, gc=False):
    """What to generate. `messages` are rendered with the chat template, unless there is a `prompt`."""

    messages: list[Message] = []
    tools: list[Tool] | None = None
    tool_choice: Any = None
    """In OpenAI's shape."""
    single_tool_call: bool = False
    """Whether the client gets only the first tool call of an answer."""
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
    """Whether the client asked for the ids of prompt and response."""
    echo_of: Any = None
    """What the dialect repeats from its own body in the answer."""

    @property
    def forces_tool(self) -> bool:
        return bool(self.tools) and self.tool_choice not in (None, "auto", "none")

    def __post_init__(self) -> None:
        temperature = self.sampling.get("temperature")
        if temperature is None:
            return
        if temperature < 0:
            raise BadRequest("temperature must not be negative.", param="temperature")
        if 0 < temperature < LOWEST_TEMPERATURE:
            # So that the Step records the temperature that its logprobs are for.
            self.sampling = self.sampling | {"temperature": LOWEST_TEMPERATURE}


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    name: str
    arguments: str
    """JSON text, as in OpenAI's API."""


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int


class TokenLogprob(msgspec.Struct, kw_only=True):
    id: int
    token: str
    logprob: float
    top: list["TokenLogprob"] = []


class Answer(msgspec.Struct, kw_only=True):
    """The answer of a finished call, just generated or rebuilt from its Step."""

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
    versions: str = ""
    """The versions of the weights that sampled it: `1.5`, or `1.5,1.6` if they changed meanwhile."""
    logprobs: list[TokenLogprob] = []
    prompt_ids: list[int] = []
    token_ids: list[int] = []

    def message(self) -> Message:
        """The message that the client will send back in its next call."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": parse_arguments(call.arguments)}}
                for call in self.tool_calls
            ]
        return message


class ToolCallDelta(msgspec.Struct, kw_only=True):
    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class AnswerDelta(msgspec.Struct, kw_only=True):
    """What a stream adds to an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []
    logprobs: list[TokenLogprob] = []
    token_ids: list[int] = []


class StreamWriter(Protocol):
    """Writes one streamed answer as server-sent events. `end` is called after the Step is durable."""

    def begin(self) -> bytes: ...
    def delta(self, delta: AnswerDelta) -> bytes: ...
    def end(self, answer: Answer) -> bytes: ...
    def error(self, message: str, kind: str) -> bytes: ...


class Dialect(Protocol):
    """One API. `name` is part of the hash of its requests."""

    name: str

    def parse(self, body: bytes) -> Request: ...
    def answer(self, request: Request, answer: Answer) -> bytes: ...
    def writer(self, request: Request, step_id: str, created: int, model: str) -> StreamWriter: ...


def event(data: bytes, name: bytes = b"") -> bytes:
    """Encodes one server-sent event."""
    return (b"event: " + name + b"\n" if name else b"") + b"data: " + data + b"\n\n"


def parse_arguments(arguments: Any) -> Any:
    """A tool call's arguments as the object that templates expect; text that is not JSON stays text."""
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    if not arguments.strip():
        return {}  # some tool parsers write a call without arguments like this
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
