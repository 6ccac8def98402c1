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

from pool.core.groups import feedback_of
from pool.core.progress import Received
from pool.core.prompts import BrokenPrompt
from pool.core.trajectories import Trajectory, source, step_of
from replay.texts import Texts
from schemas import Reward, Segment, Step
from schemas.codec import mark
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


def exported(
    trajectory: Trajectory, topic: str, late: Iterable[Received], texts: Texts | None
) -> Exported:
    """`late` is Feedback that was read while the trajectory was not open."""
    end, ended = trajectory.end, trajectory.records[-1]
    feedback = _feedback([*trajectory.feedback, *late])
    row = TrajectoryRow(
        format=FORMAT,
        trajectory_uid=end.trajectory_uid,
        prompt_uid=end.prompt_uid,
        run=end.run,
        channel=end.channel,
        status=end.status,
        reward=_reward(end.reward, feedback),
        reward_expected=end.reward_expected,
        rewards=end.rewards,
        feedback=feedback,
        reason=end.reason,
        problem=trajectory.problem,
        metadata=end.metadata,
        group_size=trajectory.group_size,
        end_id=end.end_id,
        created_at=end.created_at,
        trajectory_steps=len(trajectory.steps),
        posted=trajectory.is_scored,
        topic=topic,
        partition=ended.partition,
        offset=ended.offset,
        source_offset=end.source.offset if end.source else None,
        schema=mark(ended.header),
    )
    return Exported(row, [_step(trajectory, received, texts) for received in trajectory.steps])


def amended(row: Amendable, late: Iterable[Received]) -> Amendable:
    """The row with the Feedback that it does not have; the same object, if it has all. What it lacks
    was read after its End, so it comes behind the rest."""
    known = {given.feedback_id for given in row.feedback}
    new = [given for given in _feedback(late) if given.feedback_id not in known]
    if not new:
        return row
    return msgspec.structs.replace(
        row, reward=_reward(row.reward, new), feedback=[*row.feedback, *new]
    )


def _feedback(given: Iterable[Received]) -> list[FeedbackRow]:
    """Each once, in the order of `steps`. The first copy counts, as everywhere in the log."""
    distinct: dict[str, FeedbackRow] = {}
    for received in sorted(given, key=source):
        row = _feedback_row(received)
        distinct.setdefault(row.feedback_id, row)
    return list(distinct.values())


def _reward(said: float | None, feedback: Sequence[FeedbackRow]) -> float | None:
    given = [row.reward for row in feedback if row.step_id is None]
    return given[-1] if given else said


def _feedback_row(received: Received) -> FeedbackRow:
    feedback = feedback_of(received)
    return FeedbackRow(
        feedback_id=feedback.feedback_id,
        step_id=feedback.step_id,
        reward=feedback.reward,
        metadata=feedback.metadata,
        created_at=feedback.created_at,
    )


def _step(trajectory: Trajectory, received: Received, texts: Texts | None) -> StepRow:
    step = step_of(received)
    row = StepRow(
        step_id=step.step_id,
        step_index=step.step_index,
        prompt_ids=_prompt(trajectory, step),
        response_ids=step.response_ids,
        logprobs=step.response_logprobs,
        advantages=_advantages(trajectory, step),
        segments=step.segments,
        finish_reason=step.finish_reason,
        sampling=step.sampling,
        model=step.model,
        tokenizer=step.tokenizer,
        step_reward=step.reward,
        step_metadata=step.metadata,
        not_trainable=step.not_trainable,
        orphan=step.step_id in trajectory.orphans,
        delivered=step.step_id not in trajectory.undelivered,
        is_last=step.is_last,
        request_hash=step.request_hash.hex(),
        conversation=None if step.conversation is None else step.conversation.hex(),
        deadline=step.deadline,
        tenant=step.tenant,
        step_created_at=step.created_at,
        step_offset=received.offset,
        step_source_offset=step.source.offset if step.source else None,
        step_schema=mark(received.header),
    )
    return row if texts is None else _with_texts(row, step, texts)


def _with_texts(row: StepRow, step: Step, texts: Texts) -> StepTextRow:
    return StepTextRow(
        **msgspec.structs.asdict(row),
        prompt_text=None if row.prompt_ids is None else texts.decode(row.prompt_ids, step),
        response_text=texts.decode(step.response_ids, step),
    )


def _advantages(trajectory: Trajectory, step: Step) -> bytes | None:
    """Those of its response: a posted Step has its prompt in full, and so begins behind it."""
    if trajectory.advantages is None:
        return None
    first = len(step.prompt_ids)
    return trajectory.advantages[first : first + len(step.response_ids)]


def _prompt(trajectory: Trajectory, step: Step) -> bytes | None:
    if step.parent is None:
        return step.prompt_ids
    try:
        return trajectory.prompts[step.step_id]
    except BrokenPrompt:
        return None


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
