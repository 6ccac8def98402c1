"""The rows of an exported data set: trajectories, and Steps with their full prompts.

A column has the same name whether a row is a trajectory with its Steps nested, or a Step with its
trajectory's columns repeated. Where both have a value (a reward, metadata, an offset), the Step's
column begins with `step_`. The rows hold everything that an import needs.

Field names are column names: they are part of the format.
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
"""Raised by changes that an earlier version would misread; an import refuses a higher number."""


Ids = Annotated[bytes, "int32"]
Logprobs = Annotated[bytes, "float32"]
"""Numbers packed as in the log: no token becomes a Python object."""


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
    """None if the trajectory is invalid and the log lacks a part of the prompt."""
    response_ids: Ids
    logprobs: Logprobs
    advantages: Logprobs | None = None
    """If the environment gave them: one per id of the response."""
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
    """The reward with which it counts, with all Feedback in the exported range."""
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
    """An environment posted it in a scored group; no gateway saw its calls."""
    topic: str = ""
    partition: int | None = None
    offset: int | None = None
    """Of its End."""
    source_offset: int | None = None
    """Of its End in `steps`, if it was read from `rewarded`."""
    schema: str = ""
    reward_from_steps: bool = False
    """The reward is the sum of the Steps' rewards."""


class AmendableRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The columns that late Feedback changes, and the trajectory they belong to."""

    trajectory_uid: str
    reward: float | None
    reward_from_steps: bool
    feedback: list[FeedbackRow]


class ExportedTrajectory(NamedTuple):
    """A trajectory's row and the rows of its Steps."""

    trajectory: TrajectoryRow
    steps: Sequence[StepRow]


def unpack_numbers(step: StepRow) -> dict[str, Any]:
    """The row as a dict for a JSON encoder, which writes NaN as null."""
    row = msgspec.structs.asdict(step)
    for name, (unpack, _) in NUMBER_COLUMNS.items():
        if row[name] is not None:
            row[name] = unpack(row[name]).tolist()
    return row


def pack_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """The reverse of `unpack_numbers`, for a dict from a JSON decoder."""
    present = (name for name in NUMBER_COLUMNS if row.get(name) is not None)
    return row | {name: NUMBER_COLUMNS[name][1](row[name]) for name in present}


def _pack_logprobs(values: Iterable[float | None]) -> bytes:
    return pack_logprobs(math.nan if value is None else value for value in values)


NUMBER_COLUMNS: dict[str, tuple[Callable[[bytes], "array[Any]"], Callable[[Any], bytes]]] = {
    "prompt_ids": (unpack_ids, pack_ids),
    "response_ids": (unpack_ids, pack_ids),
    "logprobs": (unpack_logprobs, _pack_logprobs),
    "advantages": (unpack_logprobs, _pack_logprobs),
}
"""The columns of packed numbers, each with the functions that unpack and pack them."""
