"""An assembled trajectory as reward functions see it (`steplog.rewards.Trajectory`)."""

from collections.abc import Mapping
from functools import partial

from pool.core import trajectories
from pool.core.rewards import in_order
from pool.core.trajectories import step_of
from schemas import Step
from schemas.packing import unpack_ids, unpack_logprobs
from steplog.rewards import Decode, Trajectory, TrajectoryStep


def view(assembled: trajectories.Trajectory, decode: Decode) -> Trajectory:
    end = assembled.end
    return Trajectory(
        uid=assembled.uid,
        prompt_uid=assembled.prompt_uid,
        channel=end.channel,
        status=assembled.status,
        reward=end.reward,
        metadata=end.metadata,
        steps=partial(_steps, assembled, decode),
    )


def _steps(assembled: trajectories.Trajectory, decode: Decode) -> list[TrajectoryStep]:
    rated = {one.step_id: one.reward for one in in_order(assembled.feedback)}
    return [
        _step(assembled, step, rated, decode)
        for step in map(step_of, assembled.steps)
        if step.step_id not in assembled.orphans
    ]


def _step(
    assembled: trajectories.Trajectory,
    step: Step,
    rated: Mapping[str | None, float],
    decode: Decode,
) -> TrajectoryStep:
    return TrajectoryStep(
        step_id=step.step_id,
        index=step.step_index,
        finish_reason=step.finish_reason,
        reward=rated.get(step.step_id, step.reward),
        metadata=step.metadata,
        prompt_ids=lambda: unpack_ids(assembled.prompts[step.step_id]),
        response_ids=partial(unpack_ids, step.response_ids),
        logprobs=partial(unpack_logprobs, step.response_logprobs),
        decode=decode,
    )
