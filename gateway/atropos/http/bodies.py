"""The bodies of all routes as pydantic models, validated and refused as FastAPI does.

Groups are validated with these only if they differ from what stock clients send: numbers as strings
and the like are accepted, everything else is refused in FastAPI's words.
"""

import json
import math
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gateway.atropos.state.events import Env, Training
from gateway.errors import BadRequest
from gateway.http.exchange import Exchange

T = TypeVar("T")

DEFAULT_NAME = "env"
"""Name of an environment that sends none; Atropos' own server refuses it, and the environment dies."""

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(allow_inf_nan=False, ge=-1e9, le=1e9)]
"""Share of a batch. Sizes are multiplied with shares, and the product must be finite."""


def _check_unicode(text: str) -> str:
    text.encode()  # raises a ValueError for lone surrogates
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]


def _check_finite(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ValueError("NaN and Infinity are no JSON") from error
    return value


Anything = Annotated[Any, AfterValidator(_check_finite)]
Object = Annotated[dict[str, Any], AfterValidator(_check_finite)]


class Register(BaseModel):
    wandb_group: Text
    wandb_project: Text
    batch_size: Int64
    max_token_len: Int64
    checkpoint_dir: Text
    save_checkpoint_interval: Int64
    starting_step: Int64
    num_steps: Int64

    def training(self) -> Training:
        return msgspec.convert(self.model_dump(), Training)


class RegisterEnv(BaseModel):
    max_token_length: Int64
    desired_name: Text | None
    weight: Finite
    group_size: Int64
    min_batch_allocation: Share | None = None

    def env(self, host: str) -> Env:
        return Env(
            max_context_len=self.max_token_length,
            weight=self.weight,
            desired_name=self.desired_name or DEFAULT_NAME,
            group_size=self.group_size,
            registered_group_size=self.group_size,
            min_batch_allocation=self.min_batch_allocation,
            host=host,
        )


class EnvIdentifier(BaseModel):
    env_id: int


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, Anything]

    role: Anything
    content: Anything


class ScoredData(BaseModel):
    tokens: list[list[Int32]]
    masks: list[list[Int32]]
    scores: list[Finite]
    advantages: list[list[Finite]] | None = None
    ref_logprobs: list[list[Finite]] | None = None
    messages: list[list[Message]] | None = None
    generation_params: Object | None = None
    inference_logprobs: list[list[Finite]] | None = None
    overrides: list[Object] | None = None
    group_overrides: Object | None = None
    images: Anything = None
    env_id: Int32 | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[Finite]]] | None = None


REGISTER = TypeAdapter(Register)
REGISTER_ENV = TypeAdapter(RegisterEnv)
DISCONNECT_ENV = STATUS_ENV = TypeAdapter(EnvIdentifier)
GROUP = TypeAdapter(ScoredData)
GROUPS = TypeAdapter(list[ScoredData])


class InvalidBody(Exception):
    """A body that does not match its schema; `problems` are in pydantic's format."""

    def __init__(self, problems: list[dict[str, Any]]) -> None:
        super().__init__(problems)
        self.problems = problems

    def response_body(self) -> bytes:
        """FastAPI's answer with status 422, but with NaN and error objects quoted as text: FastAPI
        itself fails on those."""
        return json.dumps({"detail": [_plain(problem) for problem in self.problems]}).encode()


def content_type(exchange: Exchange) -> str:
    return exchange.header(b"content-type") or ""


def validate_body(exchange: Exchange, body: bytes, adapter: TypeAdapter[T]) -> T:
    """Validates a body as FastAPI would; raises InvalidBody or BadRequest."""
    try:
        return adapter.validate_python(_value(exchange, body), from_attributes=True)
    except ValidationError as error:
        problems: list[Any] = error.errors(include_url=False)
        raise InvalidBody(
            [problem | {"loc": ("body", *problem["loc"])} for problem in problems]
        ) from error


def _value(exchange: Exchange, body: bytes) -> Any:
    value = _parse(body, content_type(exchange)) if body else None
    if value is None:
        missing = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
        raise InvalidBody([missing])
    return value


def _parse(body: bytes, content_type: str) -> Any:
    kind = content_type.partition(";")[0].strip().lower()
    if not (kind.startswith("application/") and kind.endswith(("/json", "+json"))):
        return body.decode(errors="replace")
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise InvalidBody([invalid_json(error.msg, error.pos)]) from error
    except (ValueError, RecursionError) as error:  # text in no encoding, or nested too deeply
        raise BadRequest("There was an error parsing the body") from error


def invalid_json(message: str, position: int = 0) -> dict[str, Any]:
    return {
        "type": "json_invalid",
        "loc": ("body", position),
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": message},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str | int | float | None) else str(value)
