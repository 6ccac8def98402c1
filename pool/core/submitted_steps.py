"""Steps that an agent sampled itself, in the form in which it submits or exports them.

Their ids are derived from their content, so a Step that is submitted or imported twice is folded.
"""

import uuid
from typing import Annotated, Any

import msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Uid = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]

WITHOUT_LOGPROBS = "it was submitted without rollout_log_probs"
"""Why such a Step cannot be trained."""
SUBMITTED = uuid.UUID("0f0b8d39-4c5d-4f0b-9a52-7f9b1f0b6a57")


class SubmittedStep(msgspec.Struct, kw_only=True, gc=False):
    prompt_ids: list[TokenId]
    response_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    trajectory_uid: Uid
    prompt_uid: Uid
    step_index: Index = 0
    policy_version: Index = 0
    is_last: bool = False
    reward: float | None = None
    rollout_log_probs: list[float] | None = None
    metadata: dict[str, Any] | None = None


def step_id(trajectory_uid: str, step_index: int, prompt: bytes, response: bytes) -> str:
    """The id of a submitted Step, from its packed prompt and response."""
    identity = f"{trajectory_uid} {step_index} {prompt.hex()} {response.hex()}"
    return str(uuid.uuid5(SUBMITTED, identity))


def end_id(trajectory_uid: str) -> str:
    return str(uuid.uuid5(SUBMITTED, f"{trajectory_uid} end"))
