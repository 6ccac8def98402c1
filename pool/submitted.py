"""Ids of Steps that an agent sampled itself: made of their content, so that what is sent or imported
again is folded."""

import uuid

SUBMITTED = uuid.UUID("0f0b8d39-4c5d-4f0b-9a52-7f9b1f0b6a57")


def step_id(trajectory_uid: str, step_index: int, prompt: bytes, response: bytes) -> str:
    """Of packed ids."""
    identity = f"{trajectory_uid} {step_index} {prompt.hex()} {response.hex()}"
    return str(uuid.uuid5(SUBMITTED, identity))


def end_id(trajectory_uid: str) -> str:
    return str(uuid.uuid5(SUBMITTED, f"{trajectory_uid} end"))
