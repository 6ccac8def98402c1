"""The agents of a rollout, and what the rollouts of a group share."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from openai import AsyncOpenAI

from steplog.environment.backends.backend import Backend, OpenTrajectory, TrajectoryRegistration


@dataclass
class Agent:
    """One voice of a rollout. A `reward` of None leaves scoring to a reward worker."""

    name: str
    trajectory: OpenTrajectory
    reward: float | None = None
    advantages: dict[str, list[float]] = field(default_factory=dict)
    """By the ids of answers; see `Rollout.set_advantages`."""

    @property
    def client(self) -> AsyncOpenAI:
        """An ordinary client; its calls are recorded in this agent's trajectory."""
        return self.trajectory.client


@dataclass(frozen=True)
class GroupContext:
    """What the rollouts of a group share: the backend, and what their trajectories are opened with."""

    backend: Backend
    registration: TrajectoryRegistration
    prompt_uid: str
    agents: Sequence[str]
    timeout_s: float
    attempts: int
    on_begin: Callable[[Sequence[str]], None]
    """Called with base URLs before anything is written under them."""
    max_token_length: int | None = None

    async def name_agents(self) -> dict[str, Agent]:
        """New agents, each with a trajectory that is not registered yet."""
        has_several = len(self.agents) > 1
        prompts = [
            f"{self.prompt_uid}.{name}" if has_several else self.prompt_uid for name in self.agents
        ]
        trajectories = await asyncio.gather(*map(self.backend.name_trajectory, prompts))
        return {
            name: Agent(name, trajectory)
            for name, trajectory in zip(self.agents, trajectories, strict=True)
        }

    async def register(self, agents: Mapping[str, Agent]) -> None:
        urls = [agent.trajectory.base_url for agent in agents.values()]
        await asyncio.gather(*(self.backend.register(url, self.registration) for url in urls))
