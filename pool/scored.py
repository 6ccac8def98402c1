"""Groups that were posted through the Atropos API, as trajectories.

A ScoredGroup is one record: sequences of ids, masks that say which of them the model sampled, scores.
Each sequence becomes a trajectory, and each stretch that its mask lets through a Step, so that whoever
trains need not know where a group came from. What does not fit together was accepted by the server, as
its clients expect, and cannot be trained: its Steps say why.
"""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pool.progress import Received
from pool.trajectories import Trajectory
from schemas import ScoredGroup, Segment, Step, TrajectoryEnd

MASKED = -100
"""In a mask: an id that is not trained."""
UNKNOWN = [Segment(incarnation=0, version=0, first_token=0)]
"""Nobody told the environment which weights answered."""


def members(received: Received) -> list[Trajectory]:
    """One trajectory per sequence that has a score."""
    assert isinstance(received.record, ScoredGroup)
    group = received.record
    return [_trajectory(received, group, number) for number in range(_size(group))]


def _size(group: ScoredGroup) -> int:
    return min(len(group.tokens), len(group.scores))


def _trajectory(received: Received, group: ScoredGroup, number: int) -> Trajectory:
    uid = f"{group.group_uid}/{number}"
    steps = [Received(step, received.partition, received.offset) for step in _steps(group, number)]
    end = TrajectoryEnd(
        end_id=uid,
        trajectory_uid=uid,
        prompt_uid=group.prompt_uid,
        run=group.run,
        channel=group.channel,
        status="completed",
        steps=len(steps),
        reward=group.scores[number],
        group_size=_size(group),
        created_at=group.created_at,
    )
    return Trajectory(
        steps=steps,
        end=end,
        feedback=[],
        undelivered=frozenset(),
        records=[received],
        advantages=_advantages(group, number),
    )


def _steps(group: ScoredGroup, number: int) -> list[Step]:
    ids = np.frombuffer(group.tokens[number], "<i4")
    problem = _problem(group, number, len(ids))
    mask = np.full(len(ids), MASKED) if problem else np.frombuffer(group.masks[number], "<i4")
    logprobs = np.zeros(len(ids)) if problem else _floats(group.inference_logprobs, number)
    return [
        Step(
            step_id=f"{group.group_uid}/{number}/{index}",
            trajectory_uid=f"{group.group_uid}/{number}",
            prompt_uid=group.prompt_uid,
            step_index=index,
            run=group.run,
            channel=group.channel,
            prompt_ids=ids[:first].tobytes(),
            response_ids=ids[first:end].tobytes(),
            response_logprobs=np.asarray(logprobs[first:end], "<f4").tobytes(),
            segments=UNKNOWN,
            sampling=_sampling(group, number),
            not_trainable=problem,
            created_at=group.created_at,
        )
        for index, (first, end) in enumerate(_stretches(mask) or [(len(ids), len(ids))])
    ]


def _stretches(mask: NDArray[Any]) -> list[tuple[int, int]]:
    """Where the mask lets ids through, as first and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask != MASKED, [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _problem(group: ScoredGroup, number: int, length: int) -> str | None:
    lengths = {
        "mask": len(group.masks[number]) // 4 if number < len(group.masks) else 0,
        "logprobs": len(_floats(group.inference_logprobs, number)),
        "advantages": len(_floats(group.advantages, number)) or length,
    }
    if not lengths["logprobs"]:
        return "it came without inference_logprobs"
    if _override(group, number).get("sft"):
        return "it asks to be imitated (sft), not to be compared"
    for name, found in lengths.items():
        if found != length:
            return f"its {name} and its tokens differ in length ({found} and {length})"
    return None


def _floats(sequences: list[bytes] | None, number: int) -> NDArray[np.float64]:
    """Empty where nothing was given, which clients write as null or as an empty list."""
    given = sequences[number] if sequences and number < len(sequences) else b""
    return np.frombuffer(given, "<f8")


def _advantages(group: ScoredGroup, number: int) -> bytes | None:
    if _override(group, number).get("set_advantage_to_zero"):
        return np.zeros(len(group.tokens[number]) // 4, "<f4").tobytes()
    given = _floats(group.advantages, number)
    return np.asarray(given, "<f4").tobytes() if len(given) else None


def _override(group: ScoredGroup, number: int) -> dict[str, Any]:
    """What holds for one sequence; its own words outweigh the group's."""
    of_group = json.loads(group.group_overrides or "null") or {}
    of_each = json.loads(group.overrides or "null") or []
    own = of_each[number] if number < len(of_each) else None
    return {**of_group, **(own or {})}


def _sampling(group: ScoredGroup, number: int) -> str:
    """How it was sampled, as far as the environment says: a sequence's own words come first, then
    the generation parameters, then the group's."""
    own = json.loads(group.overrides or "null") or []
    said = (own[number] if number < len(own) else None) or {}
    of_group = json.loads(group.group_overrides or "null") or {}
    merged = {**of_group, **(json.loads(group.generation_params or "null") or {}), **said}
    known = ("temperature", "top_p", "top_k", "min_p")
    return json.dumps({name: merged[name] for name in known if merged.get(name) is not None})
