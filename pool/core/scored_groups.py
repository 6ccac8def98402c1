"""Groups that were posted through the Atropos API, as trajectories.

A ScoredGroup is one record: sequences of token ids, masks that say which of them the model sampled,
and scores. Each sequence becomes a trajectory, and each unmasked stretch of it a Step, so the trainer
need not know where a group came from. The server accepts inconsistent groups, as its clients expect;
they cannot be trained, and their Steps say why.
"""

import json
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pool.core.progress import Received
from pool.core.sampling import NEUTRAL_VALUES
from pool.core.trajectories import Trajectory
from schemas import ScoredGroup, Segment, Step, StepAdvantages, TrajectoryEnd

MASKED = -100
"""The value in a mask of an id that is not trained."""
ZERO = np.zeros(1, "<f4").tobytes()
UNKNOWN_WEIGHTS = [Segment(incarnation=0, version=0, first_token=0)]
"""Environments are not told which weights sampled a sequence."""


class _Sequence:
    """One of a group's sequences, with the options that apply to it."""

    def __init__(self, group: ScoredGroup, number: int, options: "_GroupOptions") -> None:
        self.group = group
        self.number = number
        self.uid = f"{group.group_uid}/{number}"
        self.tokens = group.tokens[number]
        self.overrides = (
            options.of_sequences[number] if number < len(options.of_sequences) else None
        ) or {}
        self.options = options

    def override(self, name: str) -> Any:
        """An override of the sequence, else of its group."""
        return {**self.options.of_group, **self.overrides}.get(name)

    def floats(self, sequences: list[bytes] | None) -> NDArray[np.float64]:
        """Its entry of an optional list; empty if missing, which clients write as null or as []."""
        packed = sequences[self.number] if sequences and self.number < len(sequences) else b""
        return np.frombuffer(packed, "<f8")


class _GroupOptions(NamedTuple):
    """The JSON fields of a group, parsed once."""

    of_group: dict[str, Any]
    of_sequences: list[dict[str, Any] | None]
    generation: dict[str, Any]


def posted_group_uid(uid: str) -> str:
    """The uid of the posted group that a trajectory belongs to; other uids are returned unchanged."""
    return uid.rpartition("/")[0] or uid


def trajectories_of(received: Received) -> list[Trajectory]:
    """The trajectories of a posted group, one per sequence that has a score."""
    assert isinstance(received.record, ScoredGroup)
    group = received.record
    options = _GroupOptions(
        json.loads(group.group_overrides or "null") or {},
        json.loads(group.overrides or "null") or [],
        json.loads(group.generation_params or "null") or {},
    )
    size = min(len(group.tokens), len(group.scores))
    sequences = [_Sequence(group, number, options) for number in range(size)]
    return [_trajectory(received, sequence, size) for sequence in sequences]


def _trajectory(received: Received, sequence: _Sequence, size: int) -> Trajectory:
    group = sequence.group
    steps = _steps(sequence)
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
        advantages=_advantages(sequence, steps),
    )
    return Trajectory(
        steps=[Received(step, received.partition, received.offset) for step in steps],
        end=end,
        feedback=[],
        undelivered=frozenset(),
        records=[received],
    )


def _steps(sequence: _Sequence) -> list[Step]:
    group, number = sequence.group, sequence.number
    ids = np.frombuffer(sequence.tokens, "<i4")
    problem = _find_problem(sequence, len(ids))
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
            segments=UNKNOWN_WEIGHTS,
            sampling=_sampling(sequence),
            not_trainable=problem,
            created_at=group.created_at,
        )
        for index, (first, end) in enumerate(_stretches(mask) or [(len(ids), len(ids))])
    ]


def _stretches(mask: NDArray[Any]) -> list[tuple[int, int]]:
    """The unmasked stretches of a mask, as first index and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask != MASKED, [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _find_problem(sequence: _Sequence, length: int) -> str | None:
    group, number = sequence.group, sequence.number
    lengths = {
        "mask": len(group.masks[number]) // 4 if number < len(group.masks) else 0,
        "logprobs": len(sequence.floats(group.inference_logprobs)),
        "advantages": len(sequence.floats(group.advantages)) or length,
    }
    if not lengths["logprobs"]:
        return "it came without inference_logprobs"
    if sequence.override("sft"):
        return "it is for supervised fine-tuning (sft), not for comparison"
    for name, count in lengths.items():
        if count != length:
            return f"its {name} and its tokens differ in length ({count} and {length})"
    return None


def _advantages(sequence: _Sequence, steps: list[Step]) -> list[StepAdvantages]:
    """The advantages of each Step's response, which begins after its full prompt."""
    if sequence.override("set_advantage_to_zero"):
        return [StepAdvantages(step_id=step.step_id, values=ZERO) for step in steps]
    values = np.asarray(sequence.floats(sequence.group.advantages), "<f4").tobytes()
    spans = ((step, len(step.prompt_ids), len(step.response_ids)) for step in steps)
    return [
        StepAdvantages(step_id=step.step_id, values=values[first : first + length])
        for step, first, length in spans
        if values
    ]


def _sampling(sequence: _Sequence) -> str:
    """The sampling settings that the environment states: the sequence's overrides take precedence over
    the generation parameters, and these over the group's overrides."""
    options = {**sequence.options.of_group, **sequence.options.generation, **sequence.overrides}
    names = ("temperature", *NEUTRAL_VALUES)
    return json.dumps({name: options[name] for name in names if options.get(name) is not None})
