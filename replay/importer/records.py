"""Turns the rows of an export back into records of the log, with prompts as deltas."""

import json
from collections.abc import Iterator, Sequence
from typing import get_args

from pool.core.prompts import encode_prompt
from replay.dataset.rows import ExportedTrajectory, StepRow, TrajectoryRow
from schemas import Feedback, Record, Step, StepAdvantages, StepNote, TrajectoryEnd
from schemas.packing import ID_BYTES
from schemas.records import Status

STATUSES = get_args(Status)


class BadRow(ValueError):
    """A row from which no trajectory can be made; the message is the reason."""


def records_of(exported: ExportedTrajectory, run: str | None = None) -> list[Record]:
    """The records in the order in which they are written. Feedback comes before the End, so that no
    reader has to wait for it."""
    trajectory, steps = exported
    _check(trajectory, steps)
    run = run or trajectory.run
    try:
        return [
            *_steps(trajectory, steps, run),
            *(_note(trajectory, step, run) for step in steps if not step.delivered),
            *_feedback(trajectory, run),
            _end(trajectory, steps, run),
        ]
    except ValueError as error:
        raise BadRow(f"trajectory {trajectory.trajectory_uid}: {error}") from error


def _check(trajectory: TrajectoryRow, steps: Sequence[StepRow]) -> None:
    uid = trajectory.trajectory_uid
    if trajectory.status not in STATUSES:
        raise BadRow(f"trajectory {uid} has an unknown status: {trajectory.status}")
    if len(steps) != trajectory.trajectory_steps:
        raise BadRow(
            f"trajectory {uid} has {len(steps)} Steps here, but its trajectory_steps is "
            f"{trajectory.trajectory_steps}; its rows must be consecutive and complete"
        )
    if len({step.step_id for step in steps}) != len(steps):
        raise BadRow(f"trajectory {uid} has two Steps with the same step_id")
    for text in (trajectory.metadata, *(step.step_metadata for step in steps)):
        _check_object(uid, text)
    for text in (step.sampling for step in steps):
        _check_object(uid, text)


def _check_object(uid: str, text: str) -> None:
    try:
        is_object = text == "{}" or isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise BadRow(f"trajectory {uid} has metadata or sampling that is not a JSON object")


def _steps(trajectory: TrajectoryRow, steps: Sequence[StepRow], run: str) -> Iterator[Step]:
    contexts: dict[str, bytes] = {}
    for row in steps:
        if row.prompt_ids is None:
            raise BadRow(
                f"step {row.step_id} of trajectory {trajectory.trajectory_uid} has no prompt"
            )
        prompt = row.prompt_ids
        stored = encode_prompt(prompt, contexts)
        if stored.parent and len(contexts[stored.parent]) == stored.prefix_length * ID_BYTES:
            del contexts[stored.parent]  # this Step extends that conversation and replaces its end
        contexts[row.step_id] = prompt + row.response_ids
        yield Step(
            step_id=row.step_id,
            trajectory_uid=trajectory.trajectory_uid,
            prompt_uid=trajectory.prompt_uid,
            step_index=row.step_index,
            run=run,
            channel=trajectory.channel,
            **stored._asdict(),
            response_ids=row.response_ids,
            response_logprobs=row.logprobs,
            segments=row.segments,
            finish_reason=row.finish_reason,
            sampling=row.sampling,
            model=row.model,
            tokenizer=row.tokenizer,
            request_hash=bytes.fromhex(row.request_hash),
            conversation=None if row.conversation is None else bytes.fromhex(row.conversation),
            reward=row.step_reward,
            metadata=row.step_metadata,
            group_size=trajectory.group_size,
            deadline=row.deadline,
            tenant=row.tenant,
            is_last=row.is_last,
            not_trainable=row.not_trainable,
            created_at=row.step_created_at,
        )


def _note(trajectory: TrajectoryRow, step: StepRow, run: str) -> StepNote:
    return StepNote(
        note_id=f"{step.step_id}-undelivered",
        step_id=step.step_id,
        trajectory_uid=trajectory.trajectory_uid,
        prompt_uid=trajectory.prompt_uid,
        run=run,
        channel=trajectory.channel,
        delivered=False,
        created_at=step.step_created_at,
    )


def _feedback(trajectory: TrajectoryRow, run: str) -> Iterator[Feedback]:
    for row in trajectory.feedback:
        yield Feedback(
            feedback_id=row.feedback_id,
            trajectory_uid=trajectory.trajectory_uid,
            prompt_uid=trajectory.prompt_uid,
            run=run,
            channel=trajectory.channel,
            step_id=row.step_id,
            reward=row.reward,
            metadata=row.metadata,
            created_at=row.created_at,
        )


def _end(trajectory: TrajectoryRow, steps: Sequence[StepRow], run: str) -> TrajectoryEnd:
    return TrajectoryEnd(
        end_id=trajectory.end_id,
        trajectory_uid=trajectory.trajectory_uid,
        prompt_uid=trajectory.prompt_uid,
        run=run,
        channel=trajectory.channel,
        status=trajectory.status,
        steps=len(steps),
        reward=trajectory.reward,
        reward_expected=trajectory.reward_expected,
        reason=trajectory.reason,
        metadata=trajectory.metadata,
        group_size=trajectory.group_size,
        rewards=trajectory.rewards,
        created_at=trajectory.created_at,
        advantages=[
            StepAdvantages(step_id=step.step_id, values=step.advantages)
            for step in steps
            if step.advantages is not None
        ],
        reward_from_steps=trajectory.reward_from_steps,
    )
