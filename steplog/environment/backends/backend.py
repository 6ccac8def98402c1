"""What a backend does, and the values that go to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from openai import AsyncOpenAI

from steplog.environment.backends.recording import Call, Json, Recording

Status = Literal["completed", "truncated", "failed", "cancelled"]
LONGEST_REASON = 2000


class Ending(NamedTuple):
    """The content of a TrajectoryEnd. `channel` is set only if it differs from the registered one."""

    status: Status = "completed"
    reward: float | None = None
    reason: str | None = None
    channel: str | None = None
    advantages: Mapping[str, Sequence[float]] | None = None
    """By the ids of answers: one for every generated token, or a single one for all of them. They take
    the place of the advantages that the trainer computes from rewards."""

    def body(self) -> Json:
        values = self._asdict() | {"reason": self.reason and self.reason[:LONGEST_REASON]}
        return {name: value for name, value in values.items() if value is not None}


class TrajectoryRegistration(NamedTuple):
    """What a trajectory is registered with."""

    channel: str = "train"
    group_size: int | None = None
    deadline_s: float | None = None
    metadata: Mapping[str, Any] = {}

    def body(self) -> Json:
        values = self._asdict() | {"metadata": dict(self.metadata)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass
class OpenTrajectory:
    """A trajectory of a running rollout: its base URL, and the client whose calls belong to it."""

    base_url: str
    prompt_uid: str
    client: AsyncOpenAI
    recording: Recording = field(default_factory=Recording)

    @property
    def calls(self) -> list[Call]:
        """The answered calls so far."""
        return self.recording.calls


class Backend(Protocol):
    """Where rollouts find their model."""

    description: str
    """For messages, such as "the gateway at URL"."""

    @property
    def wait_reason(self) -> str:
        """Why a request is waiting at the moment; empty when none is."""

    async def ready(self) -> None: ...

    async def name_trajectory(self, prompt_uid: str) -> OpenTrajectory: ...

    async def register(self, base_url: str, registration: TrajectoryRegistration) -> float: ...

    async def complete(self, base_url: str, ending: Ending) -> None: ...

    async def rate(self, base_url: str, answer_id: str, reward: float) -> None: ...

    async def close(self) -> None: ...
