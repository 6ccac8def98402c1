"""A trajectory of the log as the rows of an export."""

from collections.abc import Iterable, Sequence

import msgspec

from pool.core.groups import feedback_of
from pool.core.progress import Received
from pool.core.prompts import BrokenPrompt
from pool.core.trajectories import Trajectory, source_position, step_of
from replay.dataset.rows import (
    FORMAT,
    AmendableRow,
    ExportedTrajectory,
    FeedbackRow,
    StepRow,
    StepTextRow,
    TrajectoryRow,
)
from replay.export.text import StepTextDecoder
from schemas import Step
from schemas.codec import writer_schema_id
from schemas.packing import ID_BYTES


def to_rows(
    trajectory: Trajectory, topic: str, late: Iterable[Received], decoder: StepTextDecoder | None
) -> ExportedTrajectory:
    """`late` is Feedback that was read before the trajectory's first Step or after its End."""
    end, ended = trajectory.end, trajectory.records[-1]
    feedback = _feedback_rows([*trajectory.feedback, *late])
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
    return ExportedTrajectory(
        row, [_step_row(trajectory, received, decoder) for received in trajectory.steps]
    )


def with_late_feedback(row: AmendableRow, late: Iterable[Received]) -> AmendableRow:
    """The row with the Feedback that it lacks; the same object if it lacks none. Missing Feedback was
    read after the End, so it goes last."""
    present = {feedback.feedback_id for feedback in row.feedback}
    new = [feedback for feedback in _feedback_rows(late) if feedback.feedback_id not in present]
    if not new:
        return row
    return msgspec.structs.replace(
        row, reward=_reward(row.reward, new), feedback=[*row.feedback, *new]
    )


def _feedback_rows(records: Iterable[Received]) -> list[FeedbackRow]:
    """In the order of `steps`, without duplicates; the first copy counts, as everywhere in the log."""
    distinct: dict[str, FeedbackRow] = {}
    for received in sorted(records, key=source_position):
        row = _feedback_row(received)
        distinct.setdefault(row.feedback_id, row)
    return list(distinct.values())


def _reward(of_end: float | None, feedback: Sequence[FeedbackRow]) -> float | None:
    rewards = [row.reward for row in feedback if row.step_id is None]
    return rewards[-1] if rewards else of_end


def _feedback_row(received: Received) -> FeedbackRow:
    feedback = feedback_of(received)
    return FeedbackRow(
        feedback_id=feedback.feedback_id,
        step_id=feedback.step_id,
        reward=feedback.reward,
        metadata=feedback.metadata,
        created_at=feedback.created_at,
    )


def _step_row(
    trajectory: Trajectory, received: Received, decoder: StepTextDecoder | None
) -> StepRow:
    step = step_of(received)
    row = StepRow(
        step_id=step.step_id,
        step_index=step.step_index,
        prompt_ids=_full_prompt(trajectory, step),
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
    return row if decoder is None else _with_texts(row, step, decoder)


def _with_texts(row: StepRow, step: Step, decoder: StepTextDecoder) -> StepTextRow:
    return StepTextRow(
        **msgspec.structs.asdict(row),
        prompt_text=None if row.prompt_ids is None else decoder.decode(row.prompt_ids, step),
        response_text=decoder.decode(step.response_ids, step),
    )


def _advantages(trajectory: Trajectory, step: Step) -> bytes | None:
    """The advantages that the environment gave the Step, one per id of the response."""
    given = trajectory.advantages.get(step.step_id)
    if given is not None and len(given) == ID_BYTES:  # one for all ids
        return given * (len(step.response_ids) // ID_BYTES)
    return given


def _full_prompt(trajectory: Trajectory, step: Step) -> bytes | None:
    if step.parent is None:
        return step.prompt_ids
    try:
        return trajectory.prompts[step.step_id]
    except BrokenPrompt:
        return None
