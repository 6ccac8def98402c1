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

from gateway.atropos.events import Env, Training

T = TypeVar("T")

NO_NAME = "env"
"""What an environment is called that has no name: Atropos' own server refuses it, and it dies."""

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def _is_json(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ValueError("NaN and Infinity are no JSON") from error
    return value


Anything = Annotated[Any, AfterValidator(_is_json)]
Object = Annotated[dict[str, Any], AfterValidator(_is_json)]


class Register(BaseModel):
    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int

    def training(self) -> Training:
        return msgspec.convert(self.model_dump(), Training)


class RegisterEnv(BaseModel):
    max_token_length: int
    desired_name: str | None
    weight: Finite
    group_size: int
    min_batch_allocation: Finite | None = None

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
    distill_token_ids: list[list[list[Int32]]] | None = None
    distill_logprobs: list[list[list[Finite]]] | None = None


GROUP = TypeAdapter(ScoredData)
GROUPS = TypeAdapter(list[ScoredData])
ENV_ID = TypeAdapter(EnvIdentifier)


def checked(body: bytes, content_type: str, adapter: TypeAdapter[T]) -> T:
    """What FastAPI would make of a body, or its refusal."""
    try:
        return adapter.validate_python(_value(body, content_type))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise RequestValidationError(
            [problem | {"loc": ("body", *problem["loc"])} for problem in problems]
        ) from error


def _value(body: bytes, content_type: str) -> Any:
    if not body:
        missing = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
        raise RequestValidationError([missing])
    kind = content_type.partition(";")[0].strip().lower()
    if not (kind == "application/json" or (kind.startswith("application/") and "+json" in kind)):
        return body.decode(errors="replace")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        told, at = (
            (error.msg, error.pos) if isinstance(error, json.JSONDecodeError) else (str(error), 0)
        )
        raise RequestValidationError([no_json(told, at)]) from error


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
    return value if isinstance(value, str | int | float | None) else str(value)
