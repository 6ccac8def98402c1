"""Delta-coded prompts: what a Step stores of its prompt, and how a reader restores all of it.

A Step whose prompt begins as an earlier Step of the trajectory did (its prompt, then its response)
stores the parent's step_id, how many ids they share, a hash of these, and only the ids after them.
The parent was acknowledged before, so it lies before the child in the same partition.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from schemas import Step
from schemas.packing import ID_BYTES

WORTH_SHARING = 16 * ID_BYTES
"""A shorter prefix is stored again, since naming the parent would take more bytes than it saves."""


class PromptDelta(NamedTuple):
    """The four fields of a Step that hold its prompt."""

    prompt_ids: bytes
    parent: str | None = None
    prefix_length: int = 0
    prefix_hash: int = 0


class BrokenPrompt(ValueError):
    """A prompt cannot be restored: its parent is missing or differs from what the Step extended."""


def encode_prompt(prompt: bytes, contexts: Mapping[str, bytes]) -> PromptDelta:
    """What to store of a packed prompt.

    `contexts` maps the step_id of each acknowledged Step to its packed prompt and response. The one
    with the longest common prefix becomes the parent; of equals the newest, since a conversation
    usually continues its last turn.
    """
    best, shared = None, WORTH_SHARING - 1
    for step_id, context in contexts.items():
        length = common_prefix(prompt, context)
        if length >= max(shared, WORTH_SHARING):
            best, shared = step_id, length
    if best is None:
        return PromptDelta(prompt)
    return PromptDelta(prompt[shared:], best, shared // ID_BYTES, prefix_hash(prompt[:shared]))


def full_prompts(steps: Iterable[Step]) -> dict[str, bytes]:
    """The packed prompt of every Step, by step_id; parents must come before their children."""
    prompts: dict[str, bytes] = {}
    contexts: dict[str, bytes] = {}
    for step in steps:
        prompts[step.step_id] = prompt = full_prompt(step, contexts)
        contexts[step.step_id] = prompt + step.response_ids
    return prompts


def full_prompt(step: Step, contexts: Mapping[str, bytes]) -> bytes:
    if step.parent is None:
        return step.prompt_ids
    context = contexts.get(step.parent)
    if context is None:
        raise BrokenPrompt(f"step {step.step_id} extends {step.parent}, which is not in the log")
    prefix = context[: step.prefix_length * ID_BYTES]
    if len(prefix) != step.prefix_length * ID_BYTES or prefix_hash(prefix) != step.prefix_hash:
        raise BrokenPrompt(
            f"step {step.step_id} extends other ids than those of {step.parent} in the log"
        )
    return prefix + step.prompt_ids


def prefix_hash(packed_ids: bytes) -> int:
    digest = hashlib.blake2b(packed_ids, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def common_prefix(left: bytes, right: bytes) -> int:
    """Bytes of the common prefix, in whole ids. A binary search, since slices compare in C."""
    low, high = 0, min(len(left), len(right)) // ID_BYTES
    if left[: high * ID_BYTES] == right[: high * ID_BYTES]:
        return high * ID_BYTES
    while low < high - 1:
        middle = (low + high) // 2
        if left[low * ID_BYTES : middle * ID_BYTES] == right[low * ID_BYTES : middle * ID_BYTES]:
            low = middle
        else:
            high = middle
    return low * ID_BYTES
