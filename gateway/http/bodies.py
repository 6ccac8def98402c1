"""The request bodies of the trajectory routes, and checks that several routes share."""

import math
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from gateway.errors import BadRequest, Unprocessable, decoded
from pool.core.submitted_steps import Uid

Body = TypeVar("Body")

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
GroupSize = Annotated[int, msgspec.Meta(ge=1, le=65_536)]
Deadline = Annotated[float, msgspec.Meta(gt=0, le=5 * 24 * 3600)]
MAX_METADATA_BYTES = 1024 * 1024


class InitBody(msgspec.Struct, kw_only=True):
    prompt_uid: Uid | None = None
    channel: Name | None = None
    metadata: dict[str, Any] | None = None
    group_size: GroupSize | None = None
    deadline_s: Deadline | None = None


class RegisterBody(msgspec.Struct, kw_only=True):
    channel: Name | None = None
    metadata: dict[str, Any] | None = None
    group_size: GroupSize | None = None
    deadline_s: Deadline | None = None


class CompleteBody(msgspec.Struct, kw_only=True):
    reward: float | None = None
    channel: Name | None = None
    status: Literal["completed", "truncated", "failed", "cancelled"] = "completed"
    reward_expected: bool = False
    reason: Annotated[str, msgspec.Meta(max_length=2000)] | None = None
    advantages: dict[Uid, float | list[float]] | None = None
    """By the ids of answers: one for every generated token, or one for all of them."""


class FeedbackBody(msgspec.Struct, kw_only=True):
    """A late reward, for the trajectory or for one of its Steps."""

    reward: float
    step_id: Uid | None = None
    metadata: dict[str, Any] | None = None


def decode(body: bytes, kind: type[Body]) -> Body:
    """Decodes a body. An empty one, or JSON null, is a body without fields."""
    if not body.strip() or body.strip() == b"null":
        body = b"{}"
    fields: Body = decoded(partial(msgspec.json.decode, type=kind), body)
    return fields


def metadata_text(metadata: dict[str, Any] | None) -> str | None:
    """Metadata as records store it: JSON text."""
    if metadata is None:
        return None
    text = msgspec.json.encode(metadata)
    if len(text) > MAX_METADATA_BYTES:
        raise BadRequest(
            f"metadata has {len(text):,} bytes; the limit is {MAX_METADATA_BYTES:,}.",
            param="metadata",
        )
    return text.decode()


def check_reward(reward: float | None) -> float | None:
    if reward is not None and not math.isfinite(reward):
        raise Unprocessable("reward must be a finite number or null.", param="reward")
    return reward
