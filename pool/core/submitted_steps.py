"""Steps that an agent sampled itself, in the form in which it submits or exports them.

Their ids are derived from their content, so a Step that is submitted or imported twice is folded.
"""

import json
import uuid
from typing import Annotated, Any

import msgspec

from pool.core.sampling import untrainable_reason

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Uid = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]

WITHOUT_LOGPROBS = "it was submitted without rollout_log_probs"
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
    sampling: dict[str, Any] | None = None
    """The parameters it was sampled with, by vLLM's names; without them, plain sampling at
    temperature 1."""
    metadata: dict[str, Any] | None = None

    @property
    def not_trainable(self) -> str | None:
        """Why it cannot be trained; None if it can."""
        if not self.rollout_log_probs:
            return WITHOUT_LOGPROBS
        return untrainable_reason(self.sampling or {})

    @property
    def stored_sampling(self) -> str:
        """The sampling parameters as records store them: JSON text, without those that are null."""
        sampling = self.sampling or {}
        return json.dumps({name: value for name, value in sampling.items() if value is not None})


def step_id(trajectory_uid: str, step_index: int, prompt: bytes, response: bytes) -> str:
    """The id of a submitted Step, from its packed prompt and response."""
    identity = f"{trajectory_uid} {step_index} {prompt.hex()} {response.hex()}"
    return str(uuid.uuid5(SUBMITTED, identity))


def end_id(trajectory_uid: str) -> str:
    return str(uuid.uuid5(SUBMITTED, f"{trajectory_uid} end"))
