"""What reward functions use: the trajectory they get, the rewards they return, the errors they raise.

Users import these names from `steplog`. The module imports none of our packages: a user's own
`reward.py` or `pool.py` beside a script would take their place.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

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
        *,
        step_id: str,
        index: int,
        finish_reason: str,
        reward: float | None,
        metadata: str,
        prompt_ids: "Callable[[], array[int]]",
        response_ids: "Callable[[], array[int]]",
        logprobs: "Callable[[], array[float]]",
        decode: Decode,
    ) -> None:
        self.step_id = step_id
        self.index = index
        self.finish_reason = finish_reason
        self.reward = reward
        """The reward that this Step was given before the trajectory ended, if any: the last Feedback on
        it, else what the agent submitted with it."""
        self._metadata = metadata
        self._prompt_ids = prompt_ids
        self._response_ids = response_ids
        self._logprobs = logprobs
        self._decode = decode

    @cached_property
    def prompt_ids(self) -> "array[int]":
        return self._prompt_ids()

    @cached_property
    def response_ids(self) -> "array[int]":
        """The sampled ids, end of turn included."""
        return self._response_ids()

    @cached_property
    def logprobs(self) -> "array[float]":
        return self._logprobs()

    @cached_property
    def prompt_text(self) -> str:
        return self._decode(self.prompt_ids)

    @cached_property
    def text(self) -> str:
        """The response, without special tokens."""
        return self._decode(self.response_ids)

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        metadata: dict[str, Any] = msgspec.json.decode(self._metadata)
        return metadata


class Trajectory:
    """A complete trajectory as a reward function sees it: its Steps in order, without orphans."""

    def __init__(
        self,
        *,
        uid: str,
        prompt_uid: str,
        channel: str,
        status: str,
        reward: float | None,
        metadata: str,
        steps: Callable[[], list[TrajectoryStep]],
    ) -> None:
        self.uid = uid
        self.prompt_uid = prompt_uid
        self.channel = channel
        self.status = status
        """`completed` or `truncated`; trajectories with another status are not scored."""
        self.reward = reward
        """The reward that the agent gave when it completed the trajectory, if any."""
        self._metadata = metadata
        self._steps = steps

    @cached_property
    def steps(self) -> list[TrajectoryStep]:
        return self._steps()

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata that the trajectory was registered with, such as the true answer."""
        metadata: dict[str, Any] = msgspec.json.decode(self._metadata)
        return metadata

    @cached_property
    def text(self) -> str:
        """The last response: what the agent ended with."""
        return self.steps[-1].text if self.steps else ""

    @cached_property
    def response_tokens(self) -> int:
        """Number of tokens that the model sampled, over all Steps."""
        return sum(len(step.response_ids) for step in self.steps)
