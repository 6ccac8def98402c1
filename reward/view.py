"""A trajectory as a reward function sees it. Text is decoded when it is looked at, and not before."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from pool.core.trajectories import Trajectory, step_of
from schemas import Step
from schemas.packing import unpack_ids, unpack_logprobs

Decode = Callable[[Sequence[int]], str]


class StepView:
    """One LLM call."""

    def __init__(self, step: Step, prompt: Callable[[], bytes], decode: Decode) -> None:
        self._step = step
        self._prompt = prompt
        self._decode = decode

    @property
    def step_id(self) -> str:
        return self._step.step_id

    @property
    def index(self) -> int:
        return self._step.step_index

    @property
    def finish_reason(self) -> str:
        return self._step.finish_reason

    @property
    def reward(self) -> float | None:
        """What the agent said of this Step."""
        return self._step.reward

    @cached_property
    def prompt_ids(self) -> "array[int]":
        return unpack_ids(self._prompt())

    @cached_property
    def response_ids(self) -> "array[int]":
        """As they were sampled, end of turn included."""
        return unpack_ids(self._step.response_ids)

    @cached_property
    def logprobs(self) -> "array[float]":
        return unpack_logprobs(self._step.response_logprobs)

    @cached_property
    def prompt_text(self) -> str:
        return self._decode(self.prompt_ids)

    @cached_property
    def text(self) -> str:
        """The response, without special tokens."""
        return self._decode(self.response_ids)

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self._step.metadata)
        return found


class TrajectoryView:
    """A whole trajectory: its Steps in order, without orphans, and what was said about it."""

    def __init__(self, trajectory: Trajectory, decode: Decode) -> None:
        self._trajectory = trajectory
        self._decode = decode

    @property
    def uid(self) -> str:
        return self._trajectory.uid

    @property
    def prompt_uid(self) -> str:
        return self._trajectory.prompt_uid

    @property
    def channel(self) -> str:
        return self._trajectory.end.channel

    @property
    def status(self) -> str:
        """completed or truncated; others are not scored."""
        return self._trajectory.end.status

    @property
    def reward(self) -> float | None:
        """What the agent said at the end, if anything."""
        return self._trajectory.end.reward

    @cached_property
    def steps(self) -> list[StepView]:
        trajectory = self._trajectory
        found = [step_of(received) for received in trajectory.steps]
        return [
            StepView(step, lambda uid=step.step_id: trajectory.prompts[uid], self._decode)  # type: ignore[misc]
            for step in found
            if step.step_id not in trajectory.orphans
        ]

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        """What the trajectory was registered with, such as the true answer."""
        found: dict[str, Any] = msgspec.json.decode(self._trajectory.end.metadata)
        return found

    @cached_property
    def text(self) -> str:
        """The last response: what the agent ended with."""
        return self.steps[-1].text if self.steps else ""

    @cached_property
    def response_tokens(self) -> int:
        """Tokens that the model sampled, over all Steps."""
        return sum(len(step.response_ids) for step in self.steps)
