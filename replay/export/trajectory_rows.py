"""A trajectory of the log as the rows of an export."""

from collections.abc import Iterable

import msgspec

from pool.core.progress import Received
from pool.core.prompts import BrokenPrompt
from pool.core.rewards import GivenRewards, given_rewards, in_order
from pool.core.trajectories import Trajectory, step_of
from replay.dataset.rows import (
    FORMAT,
    AmendableRow,
    ExportedTrajectory,
    FeedbackRow,
    StepRow,
    StepTextRow,
    TrajectoryRow,
)
from replay.export.late_feedback import LateFeedback
from replay.export.text import StepTextDecoder
from schemas import Feedback, Step
from schemas.codec import writer_schema_id
from schemas.packing import ID_BYTES


def to_rows(
    trajectory: Trajectory, topic: str, late: LateFeedback, decoder: StepTextDecoder | None
) -> ExportedTrajectory:
    end, ended = trajectory.end, trajectory.records[-1]
    late_so_far = late.of(end.trajectory_uid)
    given = given_rewards(trajectory, late_so_far)
    late.keep_rewards(end.trajectory_uid, given)
    row = TrajectoryRow(
        format=FORMAT,
        trajectory_uid=end.trajectory_uid,
        prompt_uid=end.prompt_uid,
        run=end.run,
        channel=end.channel,
        status=trajectory.status,
        reward=given.counting,
        reward_from_steps=given.is_sum,
        reward_expected=end.reward_expected,
        rewards=end.rewards,
        feedback=_feedback_rows(in_order([*trajectory.feedback, *late_so_far])),
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


def with_late_feedback(row: AmendableRow, late: LateFeedback) -> AmendableRow:
    """The row with the Feedback that it lacks; the same object if it lacks none. Missing Feedback was
    read after the End, so it goes last."""
    present = {feedback.feedback_id for feedback in row.feedback}
    feedback = in_order(late.of(row.trajectory_uid))
    new = [one for one in feedback if one.feedback_id not in present]
    if not new:
        return row
    given = late.rewards(row.trajectory_uid) or GivenRewards(None, row.reward, {})
    given = given.with_feedback(new)
    return AmendableRow(
        trajectory_uid=row.trajectory_uid,
        reward=given.counting,
        reward_from_steps=given.is_sum,
        feedback=[*row.feedback, *_feedback_rows(new)],
    )


def _feedback_rows(feedback: Iterable[Feedback]) -> list[FeedbackRow]:
    return [
        FeedbackRow(
            feedback_id=one.feedback_id,
            step_id=one.step_id,
            reward=one.reward,
            metadata=one.metadata,
            created_at=one.created_at,
        )
        for one in feedback
    ]


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
