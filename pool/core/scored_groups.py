"""Groups that were posted through the Atropos API, as trajectories.

A ScoredGroup is one record: sequences of ids, masks that say which of them the model sampled, scores.
Each sequence becomes a trajectory, and each stretch that its mask lets through a Step, so that whoever
trains need not know where a group came from. What does not fit together was accepted by the server, as
its clients expect, and cannot be trained: its Steps say why.
"""

import json
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pool.core.progress import Received
from pool.core.trajectories import Trajectory
from schemas import ScoredGroup, Segment, Step, TrajectoryEnd

MASKED = -100
"""In a mask: an id that is not trained."""
UNKNOWN = [Segment(incarnation=0, version=0, first_token=0)]
"""Nobody told the environment which weights answered."""


class _Sequence:
    """One of a group's sequences, with the words that hold for it."""

    def __init__(self, group: ScoredGroup, number: int, words: "_Words") -> None:
        self.group = group
        self.number = number
        self.uid = f"{group.group_uid}/{number}"
        self.tokens = group.tokens[number]
        self.own = (words.of_each[number] if number < len(words.of_each) else None) or {}
        self.words = words

    def override(self, name: str) -> Any:
        """Its own word outweighs the group's."""
        return {**self.words.of_group, **self.own}.get(name)

    def floats(self, sequences: list[bytes] | None) -> NDArray[np.float64]:
        """Empty where nothing was given, which clients write as null or as an empty list."""
        given = sequences[self.number] if sequences and self.number < len(sequences) else b""
        return np.frombuffer(given, "<f8")


class _Words(NamedTuple):
    """What an environment said besides numbers, read once for a group."""

    of_group: dict[str, Any]
    of_each: list[dict[str, Any] | None]
    generation: dict[str, Any]


def posted_group_uid(uid: str) -> str:
    """The group that a trajectory would be in, if it was posted; any other uid is given back."""
    return uid.rpartition("/")[0] or uid


def trajectories_of(received: Received) -> list[Trajectory]:
    """One trajectory per sequence that has a score."""
    assert isinstance(received.record, ScoredGroup)
    group = received.record
    words = _Words(
        json.loads(group.group_overrides or "null") or {},
        json.loads(group.overrides or "null") or [],
        json.loads(group.generation_params or "null") or {},
    )
    size = min(len(group.tokens), len(group.scores))
    sequences = [_Sequence(group, number, words) for number in range(size)]
    return [_trajectory(received, sequence, size) for sequence in sequences]


def _trajectory(received: Received, sequence: _Sequence, size: int) -> Trajectory:
    group = sequence.group
    steps = [Received(step, received.partition, received.offset) for step in _steps(sequence)]
    end = TrajectoryEnd(
        end_id=sequence.uid,
        trajectory_uid=sequence.uid,
        prompt_uid=group.prompt_uid,
        run=group.run,
        channel=group.channel,
        status="completed",
        steps=len(steps),
        reward=group.scores[sequence.number],
        group_size=size,
        created_at=group.created_at,
    )
    return Trajectory(
        steps=steps,
        end=end,
        feedback=[],
        undelivered=frozenset(),
        records=[received],
        advantages=_advantages(sequence),
    )


def _steps(sequence: _Sequence) -> list[Step]:
    group, number = sequence.group, sequence.number
    ids = np.frombuffer(sequence.tokens, "<i4")
    problem = _problem(sequence, len(ids))
    mask = np.full(len(ids), MASKED) if problem else np.frombuffer(group.masks[number], "<i4")
    logprobs = np.zeros(len(ids)) if problem else sequence.floats(group.inference_logprobs)
    return [
        Step(
            step_id=f"{sequence.uid}/{index}",
            trajectory_uid=sequence.uid,
            prompt_uid=group.prompt_uid,
            step_index=index,
            run=group.run,
            channel=group.channel,
            prompt_ids=ids[:first].tobytes(),
            response_ids=ids[first:end].tobytes(),
            response_logprobs=np.asarray(logprobs[first:end], "<f4").tobytes(),
            segments=UNKNOWN,
            sampling=_sampling(sequence),
            not_trainable=problem,
            created_at=group.created_at,
        )
        for index, (first, end) in enumerate(_stretches(mask) or [(len(ids), len(ids))])
    ]


def _stretches(mask: NDArray[Any]) -> list[tuple[int, int]]:
    """Where the mask lets ids through, as first and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask != MASKED, [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _problem(sequence: _Sequence, length: int) -> str | None:
    group, number = sequence.group, sequence.number
    lengths = {
        "mask": len(group.masks[number]) // 4 if number < len(group.masks) else 0,
        "logprobs": len(sequence.floats(group.inference_logprobs)),
        "advantages": len(sequence.floats(group.advantages)) or length,
    }
    if not lengths["logprobs"]:
        return "it came without inference_logprobs"
    if sequence.override("sft"):
        return "it asks to be imitated (sft), not to be compared"
    for name, found in lengths.items():
        if found != length:
            return f"its {name} and its tokens differ in length ({found} and {length})"
    return None


def _advantages(sequence: _Sequence) -> bytes | None:
    if sequence.override("set_advantage_to_zero"):
        return np.zeros(len(sequence.tokens) // 4, "<f4").tobytes()
    given = sequence.floats(sequence.group.advantages)
    return np.asarray(given, "<f4").tobytes() if len(given) else None


def _sampling(sequence: _Sequence) -> str:
    """How it was sampled, as far as the environment says: a sequence's own words come first, then
    the generation parameters, then the group's."""
    said = {**sequence.words.of_group, **sequence.words.generation, **sequence.own}
    known = ("temperature", "top_p", "top_k", "min_p")
    return json.dumps({name: said[name] for name in known if said.get(name) is not None})
