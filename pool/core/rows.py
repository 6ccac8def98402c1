"""Trajectories to rows of ids, as a model is trained on them.

Rules, each tested by name:

* A Step joins the row that its prompt begins with, ids for ids; of several the longest. The ids in
  between are context: never trained. If its prompt begins with no row, history was rewritten or a
  sub-agent speaks, and it opens a row of its own.
* Orphans, Steps marked not trainable and Steps without a token are no targets. What they said may
  still stand in a later prompt, and is context there.
* A logprob is taken as it was recorded or the trajectory is refused; none is ever made up.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # whoever brings rows of his own needs nothing of the log
    from pool.core.trajectories import Trajectory
    from schemas import Step

ID_BYTES = 4
HIGHEST_LOGPROB = 1e-4
"""Engines round: a probability of one may come out a little above it."""
UNTRUNCATED: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (-1, 0, None),
    "min_p": (0, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
}
"""Anything else changes the distribution, and the engine's logprob is that of the changed one."""


@dataclass(frozen=True, slots=True)
class Row:
    """Ids that one forward pass reads, and what was recorded of them; all arrays are as long."""

    ids: NDArray[np.int32]
    trainable: NDArray[np.bool_]
    """Sampled by the model, and counts. Never the first id, which nothing predicts."""
    behaviour: NDArray[np.float32]
    """Logprob at sampling, 0 where nothing was sampled."""
    versions: NDArray[np.int32]
    """Of the weights that sampled it, -1 where nothing was sampled."""
    temperatures: NDArray[np.float32]
    """At sampling, 1 where nothing was sampled."""
    advantages: NDArray[np.float32] | None = None
    """Where the environment gave them; else the trajectory's own holds for all ids."""

    def __len__(self) -> int:
        return len(self.ids)


def plain_row(ids: NDArray[np.int32]) -> Row:
    """Ids that nobody sampled, all of them to be looked at: for asking a model about them."""
    nothing = np.zeros(len(ids), np.float32)
    trained = np.arange(len(ids)) > 0
    return Row(ids, trained, nothing, np.zeros(len(ids), np.int32), nothing + 1)


@dataclass(slots=True)
class _OpenRow:
    """Packed ids so far, and the Steps in it with the place of their first token."""

    packed: bytes
    targets: "list[tuple[int, Step]]" = field(default_factory=list)

    def add(self, prompt: bytes, step: "Step") -> None:
        self.packed = prompt + step.response_ids
        self.targets.append((len(prompt) // ID_BYTES, step))

    def close(self) -> Row:
        ids = np.frombuffer(self.packed, "<i4")
        row = Row(
            ids=ids,
            trainable=np.zeros(len(ids), np.bool_),
            behaviour=np.zeros(len(ids), np.float32),
            versions=np.full(len(ids), -1, np.int32),
            temperatures=np.ones(len(ids), np.float32),
        )
        for first, step in self.targets:
            _write(row, first, step)
        row.trainable[:1] = False
        return row


def build_rows(trajectory: "Trajectory") -> tuple[Row, ...]:
    """The rows of a trajectory without a problem, in the order in which they began."""
    rows: list[_OpenRow] = []
    for step in _targets(trajectory):
        prompt = trajectory.prompts[step.step_id]
        begun = [row for row in rows if prompt.startswith(row.packed)]
        row = max(begun, key=lambda row: len(row.packed)) if begun else _OpenRow(b"")
        if not begun:
            rows.append(row)
        row.add(prompt, step)
    closed = [row.close() for row in rows]
    if trajectory.advantages is not None:
        closed = [replace(row, advantages=_given(trajectory.advantages, row)) for row in closed]
    return tuple(row for row in closed if row.trainable.any())


def _given(packed: bytes, row: Row) -> NDArray[np.float32]:
    """Ids that stand behind the last sampled one are not in the row."""
    return np.frombuffer(packed, "<f4")[: len(row)]


def count_target_steps(trajectory: "Trajectory") -> int:
    """Of how many Steps its rows are made."""
    return sum(1 for _ in _targets(trajectory))


def find_training_problem(trajectory: "Trajectory") -> str | None:
    """Why it cannot be trained, in one sentence; None if it can."""
    if trajectory.problem is not None:
        return trajectory.problem
    targets = list(_targets(trajectory))
    if not targets:
        return _why_nothing(trajectory)
    return next((told for told in map(_problem_of_step, targets) if told), None)


def _targets(trajectory: "Trajectory") -> "Iterator[Step]":
    for received in trajectory.steps:
        step = cast("Step", received.record)
        left_out = step.not_trainable is not None or step.step_id in trajectory.orphans
        if step.response_ids and not left_out:
            yield step


def _why_nothing(trajectory: "Trajectory") -> str:
    steps = (cast("Step", received.record) for received in trajectory.steps)
    reason = next((step.not_trainable for step in steps if step.not_trainable), None)
    return f"no Step of it can be trained: {reason or 'the model said nothing'}"


def _problem_of_step(step: "Step") -> str | None:
    who, sampling = f"step {step.step_id}", json.loads(step.sampling)
    changed = [name for name, plain in UNTRUNCATED.items() if sampling.get(name) not in plain]
    if changed:
        value = sampling[changed[0]]
        return f"{who} was sampled with {changed[0]} {value}: its logprobs are not the model's"
    if not _temperature(sampling) > 0:
        return f"{who} was sampled with temperature {sampling['temperature']}"
    if not step.segments or step.segments[0].first_token > 0:
        return f"{who} does not say which weights sampled it"
    logprobs = np.frombuffer(step.response_logprobs, "<f4")
    if not np.isfinite(logprobs).all():
        return f"{who} has a logprob that is not finite"
    if logprobs.max() > HIGHEST_LOGPROB:
        return f"{who} has a logprob of {logprobs.max():.4g}, which no probability has"
    return None


def _write(row: Row, first: int, step: "Step") -> None:
    behaviour = np.frombuffer(step.response_logprobs, "<f4")
    place = slice(first, first + len(behaviour))
    row.trainable[place] = True
    row.behaviour[place] = behaviour
    row.versions[place] = _versions(step, len(behaviour))
    row.temperatures[place] = _temperature(json.loads(step.sampling))


def _versions(step: "Step", length: int) -> NDArray[np.int32]:
    versions = np.array([segment.version for segment in step.segments], np.int32)
    firsts = [segment.first_token for segment in step.segments]
    return np.repeat(versions, np.diff(np.clip([*firsts, length], 0, length)))


def _temperature(sampling: Mapping[str, Any]) -> float:
    temperature = sampling.get("temperature")
    return 1.0 if temperature is None else float(temperature)
