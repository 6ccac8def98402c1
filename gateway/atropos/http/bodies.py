"""The bodies of all routes, as FastAPI documents and checks them.

Groups come in these only when they are not what stock clients send: numbers as strings and the like
are taken, everything else is refused in FastAPI's words.
"""

import json
import math
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gateway.atropos.state.events import Env, Training
from gateway.errors import BadRequest

T = TypeVar("T")

NO_NAME = "env"
"""What an environment is called that has no name: Atropos' own server refuses it, and it dies."""

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(allow_inf_nan=False, ge=-1e9, le=1e9)]
"""Of a batch. Sizes and shares are multiplied, and what comes out must be a number."""


def _is_unicode(text: str) -> str:
    text.encode()  # its error is a ValueError, which is refused
    return text


Text = Annotated[str, AfterValidator(_is_unicode)]


def _is_json(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ValueError("NaN and Infinity are no JSON") from error
    return value


Anything = Annotated[Any, AfterValidator(_is_json)]
Object = Annotated[dict[str, Any], AfterValidator(_is_json)]


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

    def env(self) -> Env:
        return Env(
            max_context_len=self.max_token_length,
            weight=self.weight,
            desired_name=self.desired_name or NO_NAME,
            group_size=self.group_size,
            min_batch_allocation=self.min_batch_allocation,
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


GROUP = TypeAdapter(ScoredData)
GROUPS = TypeAdapter(list[ScoredData])
ENV_ID = TypeAdapter(EnvIdentifier)


def checked(body: bytes, content_type: str, adapter: TypeAdapter[T]) -> T:
    """What FastAPI would make of a body, or its refusal."""
    try:
        return adapter.validate_python(_value(body, content_type), from_attributes=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise RequestValidationError(
            [problem | {"loc": ("body", *problem["loc"])} for problem in problems]
        ) from error


def _value(body: bytes, content_type: str) -> Any:
    value = _parsed(body, content_type) if body else None
    if value is None:
        missing = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
        raise RequestValidationError([missing])
    return value


def _parsed(body: bytes, content_type: str) -> Any:
    kind = content_type.partition(";")[0].strip().lower()
    if not (kind.startswith("application/") and kind.endswith(("/json", "+json"))):
        return body.decode(errors="replace")
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise RequestValidationError([no_json(error.msg, error.pos)]) from error
    except (ValueError, RecursionError) as error:  # text in no encoding, or nested too deeply
        raise BadRequest("There was an error parsing the body") from error


def no_json(told: str, at: int = 0) -> dict[str, Any]:
    return {
        "type": "json_invalid",
        "loc": ("body", at),
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": told},
    }


def refusal(error: RequestValidationError) -> bytes:
    """FastAPI's answer, which itself fails on what it quotes: NaN, and errors as objects."""
    return json.dumps({"detail": [_plain(problem) for problem in error.errors()]}).encode()


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
