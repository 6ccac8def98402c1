"""From what functions say to what `rewarded` holds. No I/O: the order of precedence lives here.

The reward of a trajectory, the first that there is:

1. the last Feedback on it (folded by whoever assembles groups: it may come later);
2. the weighted sum of the reward functions that had an opinion;
3. what the agent said at its end;
4. the sum of what the agent said of its Steps.

Without any of them there is none, which is not 0. Failed, cancelled and expired trajectories are not
scored; a trajectory that a function failed on is marked failed, with the reason.
"""

from collections.abc import Mapping, Sequence

import msgspec

from pool.core.trajectories import Trajectory, annotated, source, step_of
from schemas import Record, Step, TrajectoryEnd
from schemas import Reward as Component

SCORED = ("completed", "truncated")
ORPHAN = "orphan: another answer to the same request was kept"
MAX_REASON = 1000


class Opinion(msgspec.Struct, frozen=True, array_like=True):
    """What one function said of one trajectory."""

    name: str
    version: str
    weight: float
    value: float | None = None
    steps: list[float | None] = []
    details: str = "{}"
    failure: str | None = None


def is_scored(trajectory: Trajectory) -> bool:
    return trajectory.end.status in SCORED and trajectory.problem is None


def rewarded(trajectory: Trajectory, opinions: Sequence[Opinion]) -> list[Record]:
    """The trajectory's records for the second topic."""
    failure = next((o for o in opinions if o.failure is not None), None)
    steps = {} if failure else _step_rewards(trajectory, opinions)
    records: list[Record] = []
    for received in trajectory.records:
        record, place = received.record, source(received)
        if isinstance(record, TrajectoryEnd):
            records.append(_end(trajectory, record, opinions, failure))
            continue
        fields = _on_step(trajectory, record, steps) if isinstance(record, Step) else {}
        records.append(annotated(record, place, **fields))
    return records


def _on_step(trajectory: Trajectory, step: Step, rewards: Mapping[str, float]) -> dict[str, object]:
    fields: dict[str, object] = {}
    if step.step_id in rewards:
        fields["reward"] = rewards[step.step_id]
    if step.step_id in trajectory.orphans and step.not_trainable is None:
        fields["not_trainable"] = ORPHAN
    return fields


def _end(
    trajectory: Trajectory,
    end: TrajectoryEnd,
    opinions: Sequence[Opinion],
    failure: Opinion | None,
) -> Record:
    components = [
        component for opinion in opinions for component in _components(trajectory, opinion)
    ]
    fields: dict[str, object] = {"rewards": components}
    if failure is not None:
        reason = f"reward {failure.name}: {failure.failure}"[:MAX_REASON]
        fields |= {"status": "failed", "reason": reason, "reward": None}
    else:
        fields["reward"] = _reward(trajectory, end, opinions)
    return annotated(end, trajectory.ended, **fields)


def _reward(
    trajectory: Trajectory, end: TrajectoryEnd, opinions: Sequence[Opinion]
) -> float | None:
    given = [opinion.value * opinion.weight for opinion in opinions if opinion.value is not None]
    if given:
        return sum(given)
    if end.reward is not None:
        return end.reward
    said = [step_of(r).reward for r in trajectory.steps]
    of_steps = [reward for reward in said if reward is not None]
    return sum(of_steps) if of_steps else None


def _step_rewards(trajectory: Trajectory, opinions: Sequence[Opinion]) -> Mapping[str, float]:
    """Process rewards by step_id: the weighted sum, for Steps that a function spoke of."""
    kept = _kept_steps(trajectory)
    found: dict[str, float] = {}
    for opinion in opinions:
        for step_id, value in zip(kept, opinion.steps, strict=False):
            if value is not None:
                found[step_id] = found.get(step_id, 0.0) + opinion.weight * value
    return found


def _components(trajectory: Trajectory, opinion: Opinion) -> list[Component]:
    common = {"name": opinion.name, "version": opinion.version, "weight": opinion.weight}
    whole = Component(**common, value=opinion.value, details=opinion.details)  # type: ignore[arg-type]
    parts = [
        Component(**common, value=value, step_id=step_id)  # type: ignore[arg-type]
        for step_id, value in zip(_kept_steps(trajectory), opinion.steps, strict=False)
        if value is not None
    ]
    return [whole, *parts]


def _kept_steps(trajectory: Trajectory) -> list[str]:
    """The Steps that functions see, in their order."""
    ids = (step_of(received).step_id for received in trajectory.steps)
    return [step_id for step_id in ids if step_id not in trajectory.orphans]
