"""Trajectories to rows of token ids, as a model is trained on them.

Rules, each tested by name:

* A Step joins the row that its prompt begins with, id for id; of several the longest. The ids in
  between are context and never trained. If its prompt begins with no row, because history was
  rewritten or a sub-agent speaks, it opens a row of its own.
* Orphans, Steps marked not trainable and Steps without a token are no targets. Their responses may
  still be part of a later prompt, and are context there.
* Logprobs are used as recorded, or the trajectory is refused; none is ever made up. The same holds
  for advantages that an environment gave.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from pool.core.logprobs import find_logprob_problem
from pool.core.sampling import temperature_of, untrainable_reason

if TYPE_CHECKING:  # code that builds rows from other data needs nothing of the log
    from pool.core.trajectories import Trajectory
    from schemas import Step

ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids that one forward pass reads, and what was recorded for each of them."""

    ids: NDArray[np.int32]
    trainable: NDArray[np.bool_]
    """Whether the id was sampled and is a target. Never the first id, which nothing predicts."""
    behaviour: NDArray[np.float32]
    """Logprob at sampling; 0 for ids that were not sampled."""
    versions: NDArray[np.int32]
    """The oldest version of the weights that had a part in sampling the id; -1 for ids that were not
    sampled."""
    temperatures: NDArray[np.float32]
    """Temperature at sampling; 1 for ids that were not sampled."""
    advantages: NDArray[np.float32] | None = None
    """Advantages of single ids, from the environment or from the credit of turns. NaN: the trajectory's
    advantage holds for this id; None: it holds for all ids."""

    def __len__(self) -> int:
        return len(self.ids)


def plain_row(ids: NDArray[np.int32], temperature: float = 1.0) -> Row:
    """A row of ids that were not sampled, all of them targets: to compute a model's logprobs."""
    nothing = np.zeros(len(ids), np.float32)
    trained = np.arange(len(ids)) > 0
    temperatures = np.full(len(ids), temperature, np.float32)
    return Row(ids, trained, nothing, np.zeros(len(ids), np.int32), temperatures)


@dataclass(slots=True)
class _OpenRow:
    """A row that may still grow: its packed ids, and its Steps with the index of their first token."""

    packed: bytes
    targets: "list[tuple[int, Step]]" = field(default_factory=list)

    def add(self, prompt: bytes, step: "Step") -> None:
        self.packed = prompt + step.response_ids
        self.targets.append((len(prompt) // ID_BYTES, step))

    def close(self, advantages: Mapping[str, bytes]) -> Row:
        ids = np.frombuffer(self.packed, "<i4")
        has_own = any(step.step_id in advantages for _, step in self.targets)
        row = Row(
            ids=ids,
            trainable=np.zeros(len(ids), np.bool_),
            behaviour=np.zeros(len(ids), np.float32),
            versions=np.full(len(ids), -1, np.int32),
            temperatures=np.ones(len(ids), np.float32),
            advantages=np.full(len(ids), np.nan, np.float32) if has_own else None,
        )
        for first, step in self.targets:
            _fill(row, first, step)
            if row.advantages is not None and step.step_id in advantages:
                tokens = slice(first, first + len(step.response_ids) // ID_BYTES)
                row.advantages[tokens] = np.frombuffer(advantages[step.step_id], "<f4")
        row.trainable[:1] = False
        return row


def build_rows(
    trajectory: "Trajectory", advantages: Mapping[str, bytes] | None = None
) -> tuple[Row, ...]:
    """The rows of a trajectory without a problem, in the order in which they began. `advantages` are
    for Steps to which its environment gave none, packed like `Trajectory.advantages`."""
    rows: list[_OpenRow] = []
    for step in _targets(trajectory):
        prompt = trajectory.prompts[step.step_id]
        prefixes = [row for row in rows if prompt.startswith(row.packed)]
        row = max(prefixes, key=lambda row: len(row.packed)) if prefixes else _OpenRow(b"")
        if not prefixes:
            rows.append(row)
        row.add(prompt, step)
    all_advantages = {**(advantages or {}), **trajectory.advantages}
    closed = [row.close(all_advantages) for row in rows]
    return tuple(row for row in closed if row.trainable.any())


def target_step_ids(trajectory: "Trajectory") -> list[str]:
    """The Steps of a trajectory that are targets."""
    return [step.step_id for step in _targets(trajectory)]


def count_sampled_tokens(trajectory: "Trajectory") -> int:
    """How many tokens the Steps of a trajectory that are targets have."""
    return sum(len(step.response_ids) // ID_BYTES for step in _targets(trajectory))


def find_training_problem(trajectory: "Trajectory") -> str | None:
    """A sentence that says why a trajectory cannot be trained; None if it can."""
    if trajectory.problem is not None:
        return trajectory.problem
    targets = list(_targets(trajectory))
    if not targets:
        return _explain_no_targets(trajectory)
    problems = (
        _find_step_problem(step) or _find_advantage_problem(step, trajectory.advantages)
        for step in targets
    )
    return next((problem for problem in problems if problem), None)


def _targets(trajectory: "Trajectory") -> "Iterator[Step]":
    for received in trajectory.steps:
        step = cast("Step", received.record)
        is_excluded = step.not_trainable is not None or step.step_id in trajectory.orphans
        if step.response_ids and not is_excluded:
            yield step


def _explain_no_targets(trajectory: "Trajectory") -> str:
    steps = (cast("Step", received.record) for received in trajectory.steps)
    reason = next((step.not_trainable for step in steps if step.not_trainable), None)
    silent = "no answer was delivered" if trajectory.orphans else "the model said nothing"
    return f"no Step of it can be trained: {reason or silent}"


def _find_step_problem(step: "Step") -> str | None:
    name = f"step {step.step_id}"
    if reason := untrainable_reason(json.loads(step.sampling)):
        return f"{name} cannot be trained: {reason}"
    if not step.segments or step.segments[0].first_token > 0:
        return f"{name} does not say which weights sampled it"
    problem = find_logprob_problem(np.frombuffer(step.response_logprobs, "<f4"))
    return f"{name} has {problem}" if problem else None


def _find_advantage_problem(step: "Step", advantages: Mapping[str, bytes]) -> str | None:
    if step.step_id not in advantages:
        return None
    values = np.frombuffer(advantages[step.step_id], "<f4")
    tokens = len(step.response_ids) // ID_BYTES
    if len(values) not in (1, tokens):
        return f"step {step.step_id} has {len(values)} advantages for {tokens} tokens"
    if not np.isfinite(values).all():
        return f"step {step.step_id} has an advantage that is not finite"
    return None


def _fill(row: Row, first: int, step: "Step") -> None:
    behaviour = np.frombuffer(step.response_logprobs, "<f4")
    tokens = slice(first, first + len(behaviour))
    row.trainable[tokens] = True
    row.behaviour[tokens] = behaviour
    row.versions[tokens] = _versions(step, len(behaviour))
    row.temperatures[tokens] = temperature_of(json.loads(step.sampling))


def _versions(step: "Step", length: int) -> NDArray[np.int32]:
    versions = np.array([segment.oldest_version for segment in step.segments], np.int32)
    firsts = [segment.first_token for segment in step.segments]
    return np.repeat(versions, np.diff(np.clip([*firsts, length], 0, length)))
