"""Notes on what happened after a Step: its answer was not delivered, or the next call overflowed.

Neither happens to most Steps, so the usual call writes no note. A Step is durable before its answer is
sent; a process that is killed between the two, within a millisecond or so, leaves no note, and its Step
counts as delivered unless a marked retry fetches it."""

import time
import uuid

from schemas import Step, StepNote


def delivery_note(step: Step, delivered: bool, overflowed: bool = False) -> StepNote:
    """The note that the answer reached no client, or that a later one withdraws that. With `overflowed`
    it says that a call after this Step did not fit into the model's context."""
    return StepNote(
        note_id=str(uuid.uuid4()),
        step_id=step.step_id,
        trajectory_uid=step.trajectory_uid,
        prompt_uid=step.prompt_uid,
        run=step.run,
        channel=step.channel,
        delivered=delivered,
        created_at=int(time.time() * 1000),
        overflowed=overflowed,
    )
