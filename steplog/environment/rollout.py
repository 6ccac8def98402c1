"""One try at an item, by one agent or by several.

Each agent speaks in a trajectory of its own, and the same agent's trajectories over all rollouts of an
item form a group: GRPO compares tries at the same role, never a buyer with a seller. Voices that shall
share one reward and one group use one client.

A rollout fails alone, whatever it raises. If what failed was an outage, it begins again in new
trajectories; the old ones are closed in a channel of their own, and take no place in the group.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

import openai
from openai import AsyncOpenAI

from steplog.environment.authors import RAISED, cancellations, is_asked_to_end, numbers, told
from steplog.environment.client import About, Backend, Ending, Status, Trajectory
from steplog.environment.errors import EnvironmentFailed, GatewayRefused, TryAgain
from steplog.environment.recording import Call, Json, conversations

Item = TypeVar("Item")

RETRIED = "retried"
"""The channel in which an attempt ends that was begun again."""
OUTAGES = (
    TryAgain,
    openai.APIConnectionError,
    openai.InternalServerError,
    openai.RateLimitError,
)
"""What says nothing about the rollout itself. OpenAI's client has retried by then."""
PAUSE = 1.0
USABLE = ("completed", "truncated")


@dataclass
class Agent:
    """A voice of a rollout. `reward` None: a reward worker scores it, or nobody does."""

    name: str
    trajectory: Trajectory
    reward: float | None = None

    @property
    def client(self) -> AsyncOpenAI:
        """An ordinary client; what goes through it is recorded in this agent's trajectory."""
        return self.trajectory.client


@dataclass(frozen=True)
class Place:
    """Where the rollouts of a group take place: what each of its trajectories is opened with."""

    backend: Backend
    about: About
    prompt_uid: str
    agents: Sequence[str]
    timeout_s: float
    attempts: int
    begun: Callable[[Sequence[str]], None]
    """Is told of base URLs before anything is written under them."""

    async def name_agents(self) -> dict[str, Agent]:
        several = len(self.agents) > 1
        prompts = [
            f"{self.prompt_uid}.{name}" if several else self.prompt_uid for name in self.agents
        ]
        named = await asyncio.gather(*map(self.backend.name, prompts))
        return {
            name: Agent(name, trajectory)
            for name, trajectory in zip(self.agents, named, strict=True)
        }

    async def register(self, agents: Mapping[str, Agent]) -> None:
        urls = [agent.trajectory.base_url for agent in agents.values()]
        await asyncio.gather(*(self.backend.register(url, self.about) for url in urls))


@dataclass
class Rollout:
    """What `collect_trajectory` gets: a client to talk with, and a place for what came of it."""

    place: Place
    agents: dict[str, Agent]
    model: str
    metrics: dict[str, float] = field(default_factory=dict)
    """The author's own; their means are reported."""
    status: Status = "completed"
    """A rollout whose last answer was cut at its length is `truncated` by itself."""
    reason: str | None = None
    retried: list[str] = field(default_factory=list)
    """Base URLs of attempts that were begun again."""
    attempt: int = 1
    seconds: float = 0.0

    @property
    def client(self) -> AsyncOpenAI:
        """The first agent's, which is the only one if the environment names none."""
        return self._first.client

    @property
    def reward(self) -> float | None:
        return self._first.reward

    @reward.setter
    def reward(self, value: float | None) -> None:
        """For all agents."""
        for agent in self.agents.values():
            agent.reward = value

    @property
    def _first(self) -> Agent:
        return next(iter(self.agents.values()))

    @property
    def is_usable(self) -> bool:
        return self.status in USABLE

    @property
    def channel(self) -> str:
        """`val` in an evaluation."""
        return self.place.about.channel

    @property
    def calls(self) -> list[Call]:
        return [call for agent in self.agents.values() for call in agent.trajectory.calls]

    def agent(self, name: str) -> Agent:
        if name not in self.agents:
            raise EnvironmentFailed(
                f"there is no agent {name!r}: name it in `agents` of the environment"
            )
        return self.agents[name]

    def conversations(self) -> list[list[Json]]:
        return [messages for _, messages in self.spoken()]

    def spoken(self) -> list[tuple[str, list[Json]]]:
        """Conversations, each with the agent whose it is."""
        return [
            (agent.name, messages)
            for agent in self.agents.values()
            for messages in conversations(agent.trajectory.calls)
        ]

    async def rate(self, answer: Any, reward: float, agent: str | None = None) -> None:
        """A process reward for the call that gave this answer."""
        speaker = self.agent(agent) if agent else self._first
        await self.place.backend.rate(speaker.trajectory.base_url, answer.id, reward)

    def fail(self, reason: str, status: Status = "failed") -> None:
        self.status, self.reason, self.reward = status, reason, None

    def endings(self) -> dict[str, Ending]:
        """How each of its trajectories ends."""
        ends = {
            agent.trajectory.base_url: Ending(self.status, agent.reward, self.reason)
            for agent in self.agents.values()
        }
        again = Ending("cancelled", reason="begun again", channel=RETRIED)
        return {**ends, **dict.fromkeys(self.retried, again)}

    async def run(
        self, collect: Callable[[Item, "Rollout"], Awaitable[float | None]], item: Item
    ) -> None:
        """Leads the rollout to its end, whatever that is."""
        began = time.monotonic()
        try:
            while not await self._try(collect, item):
                await asyncio.sleep(PAUSE * self.attempt)
                await self._begin_again()
        except asyncio.CancelledError:
            self.fail("the environment was stopped", "cancelled")
            raise
        finally:
            self.seconds = time.monotonic() - began

    async def _try(
        self, collect: Callable[[Item, "Rollout"], Awaitable[float | None]], item: Item
    ) -> bool:
        """False: there was an outage, and there are attempts left."""
        before = cancellations()
        try:
            async with asyncio.timeout(self.place.timeout_s) as limit:
                self._take(await collect(item, self))
        except GatewayRefused as refused:
            self.fail(told(refused))
        except EnvironmentFailed:
            raise
        except OUTAGES as error:
            self.fail(told(error))
            return self.attempt >= self.place.attempts
        except TimeoutError as error:
            late = limit.expired()
            self.fail(f"it took over {self.place.timeout_s:g} s" if late else told(error))
        except RAISED as error:
            if is_asked_to_end(error, before):
                raise
            self.fail(told(error))
            return not _are_outages(error) or self.attempt >= self.place.attempts
        return True

    def _take(self, reward: float | None) -> None:
        """What `collect_trajectory` returns is the reward of agents that were given none."""
        for agent in self.agents.values():
            agent.reward = reward if agent.reward is None else agent.reward
        last = self.calls[-1] if self.calls else None
        if self.status == "completed" and last is not None and last.finish_reason == "length":
            self.status = "truncated"

    async def _begin_again(self) -> None:
        self.retried += [agent.trajectory.base_url for agent in self.agents.values()]
        self.attempt += 1
        self.status, self.reason, self.metrics = "completed", None, {}
        self.agents = await self.place.name_agents()
        self.place.begun([agent.trajectory.base_url for agent in self.agents.values()])
        await self.place.register(self.agents)

    def check(self) -> None:
        """A status or a reward that no trainer could use fails the rollout; a metric is left out."""
        self.metrics = numbers("rollout.metrics", self.metrics)
        if self.status not in get_args(Status):
            self.fail(f"its status is {self.status!r}; there are {', '.join(get_args(Status))}")
        for agent in self.agents.values():
            if agent.reward is None:
                continue
            try:
                agent.reward = float(agent.reward)
            except Exception:  # any object of theirs
                self.fail(f"the reward of {agent.name} is {agent.reward!r}, not a number")
                return
            if not math.isfinite(agent.reward):
                self.fail(f"the reward of {agent.name} is {agent.reward}")
                return


def _are_outages(error: BaseException) -> bool:
    """As a TaskGroup raises them."""
    return isinstance(error, ExceptionGroup) and error.split(OUTAGES)[1] is None


async def run_all(
    collect: Callable[[Item, Rollout], Awaitable[float | None]],
    item: Item,
    rollouts: Sequence[Rollout],
) -> None:
    await asyncio.gather(*(rollout.run(collect, item) for rollout in rollouts))
