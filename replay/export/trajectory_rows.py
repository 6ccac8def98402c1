"""A trajectory of the log as the rows of an export."""

from collections.abc import Iterable, Sequence

import msgspec

from pool.core.groups import feedback_of
from pool.core.progress import Received
from pool.core.prompts import BrokenPrompt
from pool.core.trajectories import Trajectory, source_position, step_of
from replay.dataset.rows import (
    FORMAT,
    Amendable,
    Exported,
    FeedbackRow,
    StepRow,
    StepTextRow,
    TrajectoryRow,
)
from replay.export.text import Texts
from schemas import Step
from schemas.codec import writer_schema_id


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
        schema=writer_schema_id(ended.header),
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
    for received in sorted(given, key=source_position):
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
        step_schema=writer_schema_id(received.header),
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
