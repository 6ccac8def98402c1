"""Rows of an export as records of a log again, prompts as deltas."""

import json
from collections.abc import Iterator, Sequence
from typing import get_args

from pool.core.prompts import encode_prompt
from replay.dataset.rows import Exported, StepRow, TrajectoryRow
from schemas import Feedback, Record, Step, StepNote, TrajectoryEnd
from schemas.packing import ID_BYTES
from schemas.records import Status

STATUSES = get_args(Status)


class BadRow(ValueError):
    """A row that no trajectory can be made of, with the reason."""


def records_of(one: Exported, run: str | None = None) -> list[Record]:
    """In the order in which they are written. Feedback comes before the End, so that no reader has to
    look for it later."""
    about, steps = one.trajectory, one.steps
    _check(about, steps)
    run = run or about.run
    try:
        return [
            *_steps(about, steps, run),
            *(_note(about, step, run) for step in steps if not step.delivered),
            *_feedback(about, run),
            _end(about, len(steps), run),
        ]
    except ValueError as error:
        raise BadRow(f"trajectory {about.trajectory_uid}: {error}") from error


def _check(about: TrajectoryRow, steps: Sequence[StepRow]) -> None:
    uid = about.trajectory_uid
    if about.status not in STATUSES:
        raise BadRow(f"trajectory {uid} has status {about.status}, and there is no such one")
    if len(steps) != about.trajectory_steps:
        raise BadRow(
            f"trajectory {uid} has {len(steps)} Steps here and {about.trajectory_steps} by its "
            "trajectory_steps; its rows must stand together and be complete"
        )
    if len({step.step_id for step in steps}) != len(steps):
        raise BadRow(f"trajectory {uid} has two Steps with the same step_id")
    for text in (about.metadata, *(step.step_metadata for step in steps)):
        _check_object(uid, text)
    for text in (step.sampling for step in steps):
        _check_object(uid, text)


def _check_object(uid: str, text: str) -> None:
    try:
        is_object = text == "{}" or isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise BadRow(f"trajectory {uid} has metadata or sampling that is no JSON object")


def _steps(about: TrajectoryRow, steps: Sequence[StepRow], run: str) -> Iterator[Step]:
    contexts: dict[str, bytes] = {}
    for row in steps:
        if row.prompt_ids is None:
            raise BadRow(f"step {row.step_id} of trajectory {about.trajectory_uid} has no prompt")
        prompt = row.prompt_ids
        stored = encode_prompt(prompt, contexts)
        if stored.parent and len(contexts[stored.parent]) == stored.prefix_length * ID_BYTES:
            del contexts[stored.parent]  # this Step is the end of that line of conversation now
        contexts[row.step_id] = prompt + row.response_ids
        yield Step(
            step_id=row.step_id,
            trajectory_uid=about.trajectory_uid,
            prompt_uid=about.prompt_uid,
            step_index=row.step_index,
            run=run,
            channel=about.channel,
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
            group_size=about.group_size,
            deadline=row.deadline,
            tenant=row.tenant,
            is_last=row.is_last,
            not_trainable=row.not_trainable,
            created_at=row.step_created_at,
        )


def _note(about: TrajectoryRow, step: StepRow, run: str) -> StepNote:
    return StepNote(
        note_id=f"{step.step_id}-undelivered",
        step_id=step.step_id,
        trajectory_uid=about.trajectory_uid,
        prompt_uid=about.prompt_uid,
        run=run,
        channel=about.channel,
        delivered=False,
        created_at=step.step_created_at,
    )


def _feedback(about: TrajectoryRow, run: str) -> Iterator[Feedback]:
    for given in about.feedback:
        yield Feedback(
            feedback_id=given.feedback_id,
            trajectory_uid=about.trajectory_uid,
            prompt_uid=about.prompt_uid,
            run=run,
            channel=about.channel,
            step_id=given.step_id,
            reward=given.reward,
            metadata=given.metadata,
            created_at=given.created_at,
        )


def _end(about: TrajectoryRow, steps: int, run: str) -> TrajectoryEnd:
    return TrajectoryEnd(
        end_id=about.end_id,
        trajectory_uid=about.trajectory_uid,
        prompt_uid=about.prompt_uid,
        run=run,
        channel=about.channel,
        status=about.status,
        steps=steps,
        reward=about.reward,
        reward_expected=about.reward_expected,
        reason=about.reason,
        metadata=about.metadata,
        group_size=about.group_size,
        rewards=about.rewards,
        created_at=about.created_at,
    )
