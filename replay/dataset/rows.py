"""What stands in an export: a trajectory, and its Steps with their prompts in full.

A column has the same name whether a row is a trajectory, with its Steps nested, or a Step, with its
trajectory's columns repeated. What both have (a reward, metadata, a place) has `step_` before it
where it is the Step's. Everything that an import needs is here, so that nothing else has to travel.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from schemas import Reward, Segment
from schemas.packing import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from schemas.records import Status

FORMAT = 1
"""Counts changes that an earlier version would misread; an import refuses a higher one."""


Ids = Annotated[bytes, "int32"]
Logprobs = Annotated[bytes, "float32"]
"""Numbers, packed as in the log: a row never holds them one by one."""


class FeedbackRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    feedback_id: str
    step_id: str | None = None
    reward: float
    metadata: str = "{}"
    created_at: int = 0


class StepRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    step_id: str
    step_index: int
    prompt_ids: Ids | None
    """None: its trajectory has a problem, and the log does not have the whole prompt."""
    response_ids: Ids
    logprobs: Logprobs
    advantages: Logprobs | None = None
    """Where an environment gave them, one for each id of the response."""
    segments: list[Segment] = []
    finish_reason: str = "stop"
    sampling: str = "{}"
    model: str = ""
    tokenizer: str = ""
    step_reward: float | None = None
    step_metadata: str = "{}"
    not_trainable: str | None = None
    orphan: bool = False
    delivered: bool = True
    is_last: bool = False
    request_hash: str = ""
    conversation: str | None = None
    deadline: int | None = None
    tenant: str = ""
    step_created_at: int = 0
    step_offset: int | None = None
    step_source_offset: int | None = None
    step_schema: str = ""


class StepTextRow(StepRow, frozen=True, kw_only=True, gc=False):
    prompt_text: str | None = None
    response_text: str | None = None


class TrajectoryRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    format: int
    trajectory_uid: str
    prompt_uid: str
    run: str
    channel: str
    status: Status
    reward: float | None = None
    """The last Feedback on it in the exported range, else what its End says."""
    reward_expected: bool = False
    rewards: list[Reward] = []
    feedback: list[FeedbackRow] = []
    reason: str | None = None
    problem: str | None = None
    metadata: str = "{}"
    group_size: int | None = None
    end_id: str
    created_at: int = 0
    trajectory_steps: int
    posted: bool = False
    """By an environment that scored it itself, as one of a group; no gateway saw its calls."""
    topic: str = ""
    partition: int | None = None
    offset: int | None = None
    """Of its End."""
    source_offset: int | None = None
    """Of its End in `steps`, if it was read from rewards."""
    schema: str = ""


class Amendable(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The columns that late Feedback changes, and whose they are."""

    trajectory_uid: str
    reward: float | None
    feedback: list[FeedbackRow]


class Exported(NamedTuple):
    trajectory: TrajectoryRow
    steps: Sequence[StepRow]


def unpacked(step: StepRow) -> dict[str, Any]:
    """A row for a JSON encoder. JSON has no NaN: it becomes null."""
    row = msgspec.structs.asdict(step)
    for name, (unpack, _) in NUMBERS.items():
        if row[name] is not None:
            row[name] = unpack(row[name]).tolist()
    return row


def packed(row: dict[str, Any]) -> dict[str, Any]:
    """The other way round, for what a decoder gives."""
    there = (name for name in NUMBERS if row.get(name) is not None)
    return row | {name: NUMBERS[name][1](row[name]) for name in there}


def _pack_logprobs(values: Iterable[float | None]) -> bytes:
    return pack_logprobs(math.nan if value is None else value for value in values)


NUMBERS: dict[str, tuple[Callable[[bytes], "array[Any]"], Callable[[Any], bytes]]] = {
    "prompt_ids": (unpack_ids, pack_ids),
    "response_ids": (unpack_ids, pack_ids),
    "logprobs": (unpack_logprobs, _pack_logprobs),
    "advantages": (unpack_logprobs, _pack_logprobs),
}
"""The columns that hold them."""
