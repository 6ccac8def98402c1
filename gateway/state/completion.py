"""How a trajectory ends: what its agent reports, and the TrajectoryEnd made from it."""

import time
import uuid

import msgspec

from gateway.errors import Conflict
from gateway.state.trajectory import TrajectoryState
from schemas import StepAdvantages, TrajectoryEnd
from schemas.records import Status

END_IDS = uuid.UUID("6a1d0c1e-9a0e-4f3c-8f57-2a8a3a1f9d10")
"""Name space of the ids of TrajectoryEnds: readers fold an equal End that is written again."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """How a trajectory ended, as its agent reports it."""

    status: Status = "completed"
    reward: float | None = None
    reward_expected: bool = False
    channel: str | None = None
    reason: str | None = None
    advantages: list[StepAdvantages] = []


def trajectory_end(trajectory: TrajectoryState, completion: Completion) -> TrajectoryEnd:
    """The End of a trajectory. The same completion gives the same end_id every time."""
    registration = trajectory.registration
    return TrajectoryEnd(
        end_id=str(uuid.uuid5(END_IDS, f"{trajectory.uid} {completion}")),
        trajectory_uid=trajectory.uid,
        prompt_uid=registration.prompt_uid,
        run=registration.run,
        channel=completion.channel or registration.channel,
        status=completion.status,
        steps=trajectory.step_count,
        reward=completion.reward,
        reward_expected=completion.reward_expected,
        reason=completion.reason,
        metadata=registration.metadata,
        group_size=registration.group_size,
        created_at=int(time.time() * 1000),
        advantages=completion.advantages,
    )


def check_repeats(end: TrajectoryEnd, completion: Completion) -> None:
    """Refuses a completion that differs from the End that the log has."""
    if end.status == "expired":
        raise Conflict(
            f"Trajectory {end.trajectory_uid} has expired: its deadline passed before it was "
            "completed, so it is not trained. Start a new trajectory, with a longer deadline_s if it "
            "needs more time."
        )
    is_equal = (end.status, end.reward) == (completion.status, completion.reward)
    if not is_equal or completion.channel not in (None, end.channel):
        raise Conflict(
            f"Trajectory {end.trajectory_uid} is already completed with status {end.status} and "
            f"reward {end.reward}. Send a later reward with POST …/feedback."
        )
