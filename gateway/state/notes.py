"""Notes on whether a Step's answer was delivered.

Most answers are, so only the others have a note, which costs the usual call nothing. A Step is durable
before its answer is sent; a process that is killed between the two, within a millisecond or so, leaves
no note, and its Step counts as delivered unless a marked retry fetches it."""

import time
import uuid

from schemas import Step, StepNote


def delivery_note(step: Step, delivered: bool) -> StepNote:
    """The note that the answer reached no client, or that a later one withdraws that."""
    return StepNote(
        note_id=str(uuid.uuid4()),
        step_id=step.step_id,
        trajectory_uid=step.trajectory_uid,
        prompt_uid=step.prompt_uid,
        run=step.run,
        channel=step.channel,
        delivered=delivered,
        created_at=int(time.time() * 1000),
    )
