"""Turns the results of reward functions into the records of `rewarded`. Pure: no I/O.

The End gets the weighted sum of the reward functions that had an opinion, else the reward that the
agent gave at the end, else the sum of the Steps' rewards. Feedback on the whole trajectory is left to
the readers of `rewarded`, since it may arrive later (`pool.core.rewards`).

Without any of them there is no reward, which is not the same as 0. Failed, cancelled and expired
trajectories are not scored. If a function fails on a trajectory, its End is written with status
`failed` and the reason.
"""

from collections.abc import Mapping, Sequence

from pool.core.rewards import SCORED_STATUSES, given_rewards
from pool.core.trajectories import Trajectory, annotate, source_position, step_of
from reward.scoring.results import FunctionResult
from schemas import Record, Step, TrajectoryEnd
from schemas import Reward as RewardComponent

ORPHAN = "orphan: the answer was not delivered and nothing continues it"
MAX_REASON = 1000


def is_scored(trajectory: Trajectory) -> bool:
    return trajectory.status in SCORED_STATUSES and trajectory.problem is None


def first_failure(results: Sequence[FunctionResult]) -> FunctionResult | None:
    return next((result for result in results if result.failure is not None), None)


def rewarded_records(trajectory: Trajectory, results: Sequence[FunctionResult]) -> list[Record]:
    """The trajectory's records as they are written to `rewarded`."""
    failure = first_failure(results)
    step_rewards = {} if failure else _step_rewards(trajectory, results)
    records: list[Record] = []
    for received in trajectory.records:
        record = received.record
        if isinstance(record, TrajectoryEnd):
            records.append(_end(trajectory, record, results, failure))
            continue
        fields = _step_fields(trajectory, record, step_rewards) if isinstance(record, Step) else {}
        records.append(annotate(record, source_position(received), **fields))
    return records


def _step_fields(
    trajectory: Trajectory, step: Step, rewards: Mapping[str, float]
) -> dict[str, object]:
    fields: dict[str, object] = {}
    if step.step_id in rewards:
        fields["reward"] = rewards[step.step_id]
    if step.step_id in trajectory.orphans and step.not_trainable is None:
        fields["not_trainable"] = ORPHAN
    return fields


def _end(
    trajectory: Trajectory,
    end: TrajectoryEnd,
    results: Sequence[FunctionResult],
    failure: FunctionResult | None,
) -> Record:
    components = [component for result in results for component in _components(trajectory, result)]
    fields: dict[str, object] = {"rewards": components}
    if failure is not None:
        reason = f"reward {failure.name}: {failure.failure}"[:MAX_REASON]
        fields |= {"status": "failed", "reason": reason, "reward": None}
    else:
        reward, is_sum = reward_of_end(trajectory, results)
        fields |= {
            "status": trajectory.status,
            "reward": reward,
            "reward_from_steps": is_sum,
        }
    return annotate(end, trajectory.ended, **fields)


def reward_of_end(
    trajectory: Trajectory, results: Sequence[FunctionResult]
) -> tuple[float | None, bool]:
    """The reward for the trajectory's End, and whether it is the sum of its Steps' rewards."""
    weighted = [result.value * result.weight for result in results if result.value is not None]
    if weighted:
        return sum(weighted), False
    given = given_rewards(trajectory, process_rewards=_step_rewards(trajectory, results))
    reward = given.without_feedback
    return reward, given.end is None and reward is not None


def _step_rewards(trajectory: Trajectory, results: Sequence[FunctionResult]) -> Mapping[str, float]:
    """Process rewards by step_id: the weighted sum over the functions that scored the Step."""
    step_ids = _visible_steps(trajectory)
    rewards: dict[str, float] = {}
    for result in results:
        for step_id, value in zip(step_ids, result.steps, strict=False):
            if value is not None:
                rewards[step_id] = rewards.get(step_id, 0.0) + result.weight * value
    return rewards


def _components(trajectory: Trajectory, result: FunctionResult) -> list[RewardComponent]:
    common = {"name": result.name, "version": result.version, "weight": result.weight}
    of_trajectory = RewardComponent(**common, value=result.value, details=result.details)  # type: ignore[arg-type]
    of_steps = [
        RewardComponent(**common, value=value, step_id=step_id)  # type: ignore[arg-type]
        for step_id, value in zip(_visible_steps(trajectory), result.steps, strict=False)
        if value is not None
    ]
    return [of_trajectory, *of_steps]


def _visible_steps(trajectory: Trajectory) -> list[str]:
    """Ids of the Steps that functions see, in their order: all but orphans."""
    ids = (step_of(received).step_id for received in trajectory.steps)
    return [step_id for step_id in ids if step_id not in trajectory.orphans]
