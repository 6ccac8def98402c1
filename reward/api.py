"""What reward functions use: the trajectory they get, the rewards they return, the errors they raise.

Users import these names from `steplog`. The module loads neither a Kafka client nor torch, so that a
process for reward functions starts fast.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from pool.core import trajectories
from pool.core.rewards import in_order
from schemas import Step
from schemas.packing import unpack_ids, unpack_logprobs

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, without special tokens."""


@dataclass(frozen=True)
class Reward:
    """A reward with more than one number. `steps` holds process rewards, one (or None) per Step;
    `details` is stored in the record for people to read."""

    value: float | None = None
    steps: Sequence[float | None] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


class RewardFailed(Exception):
    """Raised when this trajectory cannot be scored and a retry would not help."""


class RewardUnavailable(Exception):
    """Raised when something the function needs, such as a judge, is down: the trajectory waits."""


class TrajectoryStep:
    """One LLM call of a trajectory. Ids and texts are decoded on first access."""

    def __init__(
        self,
        step: Step,
        reward: float | None,
        full_prompt: Callable[[], bytes],
        decode: Decode,
    ) -> None:
        self._step = step
        self._reward = reward
        self._full_prompt = full_prompt
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
        """The reward that this Step was given before the trajectory ended, if any: the last Feedback on
        it, else what the agent submitted with it."""
        return self._reward

    @cached_property
    def prompt_ids(self) -> "array[int]":
        return unpack_ids(self._full_prompt())

    @cached_property
    def response_ids(self) -> "array[int]":
        """The sampled ids, end of turn included."""
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
        metadata: dict[str, Any] = msgspec.json.decode(self._step.metadata)
        return metadata


class Trajectory:
    """A complete trajectory as a reward function sees it: its Steps in order, without orphans."""

    def __init__(self, assembled: trajectories.Trajectory, decode: Decode) -> None:
        self._assembled = assembled
        self._decode = decode

    @property
    def uid(self) -> str:
        return self._assembled.uid

    @property
    def prompt_uid(self) -> str:
        return self._assembled.prompt_uid

    @property
    def channel(self) -> str:
        return self._assembled.end.channel

    @property
    def status(self) -> str:
        """`completed` or `truncated`; trajectories with another status are not scored."""
        return self._assembled.end.status

    @property
    def reward(self) -> float | None:
        """The reward that the agent gave when it completed the trajectory, if any."""
        return self._assembled.end.reward

    @cached_property
    def steps(self) -> list[TrajectoryStep]:
        assembled = self._assembled
        rated = {one.step_id: one.reward for one in in_order(assembled.feedback)}
        return [
            TrajectoryStep(
                step,
                rated.get(step.step_id, step.reward),
                lambda uid=step.step_id: assembled.prompts[uid],  # type: ignore[misc]
                self._decode,
            )
            for step in map(trajectories.step_of, assembled.steps)
            if step.step_id not in assembled.orphans
        ]

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata that the trajectory was registered with, such as the true answer."""
        metadata: dict[str, Any] = msgspec.json.decode(self._assembled.end.metadata)
        return metadata

    @cached_property
    def text(self) -> str:
        """The last response: what the agent ended with."""
        return self.steps[-1].text if self.steps else ""

    @cached_property
    def response_tokens(self) -> int:
        """Number of tokens that the model sampled, over all Steps."""
        return sum(len(step.response_ids) for step in self.steps)
