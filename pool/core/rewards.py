"""The reward of a trajectory: which of the rewards that it was given counts.

The first of these that exists:

1. the last Feedback on the whole trajectory;
2. the reward in its End: of the reward functions, else of the agent;
3. the sum of the rewards of its Steps. Orphans are left out, as they are not trained either.

The reward of a Step is the last Feedback on it, else what reward functions say of it, else what the
agent submitted with it. The last Feedback is the last by offset in `steps`, before the End or after
it; a copy never undoes a newer one.

A trainer may credit the reward of a Step to that Step (`Group.turn_rewards`). Then it counts beside
1 or 2, which is the outcome of the trajectory.

Rewards never change how a trajectory ended. Feedback on one that failed, was cancelled or has expired
is its reward for whoever reads it, but it is not trained, and its Steps have no sum.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Self

import msgspec

from pool.core.progress import Received
from pool.core.trajectories import Trajectory, source_position, step_of
from schemas import Feedback

SCORED_STATUSES = ("completed", "truncated")
"""The statuses of trajectories that can be scored and trained."""


class GivenRewards(msgspec.Struct, frozen=True, array_like=True):
    """The rewards that a trajectory was given."""

    feedback: float | None
    """The last on the whole trajectory."""
    end: float | None
    """In its End, unless that is the sum of its Steps' rewards."""
    steps: dict[str, float | None]
    """By step_id. Empty if they cannot count, because the End has a reward or the trajectory failed."""

    @property
    def counting(self) -> float | None:
        """The reward with which the trajectory counts; None is no reward, never 0."""
        return self.feedback if self.feedback is not None else self.without_feedback

    @property
    def outcome(self) -> float | None:
        """The reward of the trajectory as a whole, apart from those of its Steps."""
        return self.feedback if self.feedback is not None else self.end

    @property
    def without_feedback(self) -> float | None:
        """The reward as it would count without Feedback on the whole trajectory."""
        return self.end if self.end is not None else self._sum_of_steps

    @property
    def is_sum(self) -> bool:
        """Whether the counting reward is the sum of the Steps' rewards."""
        return self.feedback is None and self.end is None and self._sum_of_steps is not None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing: the trajectory has a reward of its own, or each Step has one."""
        if self.feedback is not None or self.end is not None:
            return True
        return bool(self.steps) and None not in self.steps.values()

    def with_feedback(self, feedback: Iterable[Feedback]) -> Self:
        """These rewards after Feedback, given in the order of `steps`."""
        on_trajectory, on_steps = self.feedback, dict(self.steps)
        for one in feedback:
            if one.step_id is None:
                on_trajectory = one.reward
            elif one.step_id in on_steps:
                on_steps[one.step_id] = one.reward
        return msgspec.structs.replace(self, feedback=on_trajectory, steps=on_steps)

    @property
    def _sum_of_steps(self) -> float | None:
        rewards = [reward for reward in self.steps.values() if reward is not None]
        try:
            return math.fsum(rewards) if rewards else None
        except (OverflowError, ValueError):  # the sum is too large, or inf - inf
            return math.nan


def given_rewards(
    trajectory: Trajectory,
    later: Iterable[Received] = (),
    process_rewards: Mapping[str, float] | None = None,
) -> GivenRewards:
    """`later` is Feedback that was read after the End. `process_rewards` are what reward functions say
    of Steps, by step_id, where the records do not have it yet."""
    end = trajectory.end
    own = None if end.reward_from_steps else end.reward
    steps: dict[str, float | None] = {}
    if own is None and trajectory.status in SCORED_STATUSES:
        steps = _rewards_of_steps(trajectory, process_rewards or {})
    feedback = in_order([*trajectory.feedback, *later])
    return GivenRewards(None, own, steps).with_feedback(feedback)


def step_rewards(trajectory: Trajectory, later: Iterable[Received] = ()) -> dict[str, float | None]:
    """The reward of every Step but orphans, by step_id in the order of the Steps, whatever else the
    trajectory was rewarded with."""
    without_feedback = GivenRewards(None, None, _rewards_of_steps(trajectory, {}))
    return without_feedback.with_feedback(in_order([*trajectory.feedback, *later])).steps


def _rewards_of_steps(
    trajectory: Trajectory, process_rewards: Mapping[str, float]
) -> dict[str, float | None]:
    steps = [step_of(received) for received in trajectory.steps]
    return {
        step.step_id: process_rewards.get(step.step_id, step.reward)
        for step in steps
        if step.step_id not in trajectory.orphans
    }


def in_order(received: Iterable[Received]) -> list[Feedback]:
    """Feedback in the order of `steps`, without copies."""
    first: dict[str, Feedback] = {}
    for one in sorted(received, key=source_position):
        first.setdefault(feedback_of(one).feedback_id, feedback_of(one))
    return list(first.values())


def feedback_of(received: Received) -> Feedback:
    assert isinstance(received.record, Feedback)
    return received.record
