"""One attempt at an item, by one agent or by several.

Each agent speaks in a trajectory of its own, and the trajectories of the same agent over all
rollouts of an item form a group: GRPO compares attempts at the same role, never a buyer with a
seller. Voices that should share one reward and one group use one client.

A rollout fails alone, whatever it raises. If the cause was an outage, it starts over in new
trajectories; the old ones are closed in a separate channel and take no place in the group.

A rollout that reaches a limit, of the model's context or of time, is truncated and stays in its group:
if it left, the rest of the group would be compared with survivors only.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

import openai
from openai import AsyncOpenAI

from steplog.environment.author_code import (
    AUTHOR_ERRORS,
    count_cancel_requests,
    describe_error,
    finite_numbers,
    is_requested_cancellation,
)
from steplog.environment.backends.backend import Ending, Status
from steplog.environment.backends.recording import Call, Json, conversations
from steplog.environment.errors import EnvironmentFailed, GatewayRefused, TryAgain
from steplog.environment.rollouts.agents import Agent, GroupContext

Item = TypeVar("Item")

RETRIED = "retried"
"""The channel in which abandoned attempts end."""
OUTAGES = (
    TryAgain,
    openai.APIConnectionError,
    openai.InternalServerError,
    openai.RateLimitError,
)
"""Errors that say nothing about the rollout itself. OpenAI's client has already retried."""
PAUSE = 1.0
USABLE = ("completed", "truncated")


@dataclass
class Rollout:
    """What `collect_trajectory` works with: a client to talk to, and fields for the result."""

    context: GroupContext
    agents: dict[str, Agent]
    model: str
    metrics: dict[str, float] = field(default_factory=dict)
    """The author's own metrics; their means are reported."""
    status: Status = "completed"
    """It becomes `truncated` by itself if the last answer reached its length limit, the last call did
    not fit into the model's context, or the rollout took too long."""
    reason: str | None = None
    abandoned: list[str] = field(default_factory=list)
    """Base URLs of earlier attempts, which met an outage."""
    attempt: int = 1
    seconds: float = 0.0

    @property
    def client(self) -> AsyncOpenAI:
        """The first agent's client; it is the only one unless the environment names several."""
        return self._first.client

    @property
    def reward(self) -> float | None:
        return self._first.reward

    @reward.setter
    def reward(self, value: float | None) -> None:
        """Give the same reward to all agents."""
        for agent in self.agents.values():
            agent.reward = value

    @property
    def _first(self) -> Agent:
        return next(iter(self.agents.values()))

    @property
    def is_usable(self) -> bool:
        return self.status in USABLE

    @property
    def is_dropped(self) -> bool:
        return self.status == "cancelled"

    @property
    def is_failed(self) -> bool:
        return not self.is_usable and not self.is_dropped

    @property
    def channel(self) -> str:
        """`val` in an evaluation, otherwise `train`."""
        return self.context.registration.channel

    @property
    def calls(self) -> list[Call]:
        return [call for agent in self.agents.values() for call in agent.trajectory.calls]

    @property
    def overflowed(self) -> bool:
        """Whether the last call of an agent, after others, did not fit into the model's context."""
        trajectories = [agent.trajectory for agent in self.agents.values()]
        return any(each.recording.overflowed and each.calls for each in trajectories)

    @property
    def tokens(self) -> int:
        """Tokens that the model generated in all calls, as the server counts them."""
        return sum(call.tokens for call in self.calls)

    @property
    def longest_call(self) -> int:
        """Tokens of the longest call, prompt and answer together."""
        return max((call.prompt_tokens + call.tokens for call in self.calls), default=0)

    def agent(self, name: str) -> Agent:
        if name not in self.agents:
            raise EnvironmentFailed(
                f"There is no agent {name!r}. List it in `agents` of the environment."
            )
        return self.agents[name]

    def conversations(self) -> list[list[Json]]:
        return [messages for _, messages in self.conversations_by_agent()]

    def conversations_by_agent(self) -> list[tuple[str, list[Json]]]:
        return [
            (agent.name, messages)
            for agent in self.agents.values()
            for messages in conversations(agent.trajectory.calls)
        ]

    async def rate(self, answer: Any, reward: float, agent: str | None = None) -> None:
        """Give a process reward to the call that returned this answer."""
        speaker = self.agent(agent) if agent else self._first
        await self.context.backend.rate(speaker.trajectory.base_url, answer.id, reward)

    def set_advantages(
        self, answer: Any, values: float | Iterable[float], agent: str | None = None
    ) -> None:
        """Set the advantages of the tokens of this answer: one number for all of them, or one for each
        (`answer.usage.completion_tokens` in all; with `logprobs=True` the answer lists them). They take
        the place of those that the trainer computes from rewards, for this answer only."""
        speaker = self.agent(agent) if agent else self._first
        numbers = [values] if isinstance(values, int | float) else list(values)
        speaker.advantages[answer.id] = [float(number) for number in numbers]

    def fail(self, reason: str, status: Status = "failed") -> None:
        self.status, self.reason, self.reward = status, reason, None

    def truncate(self, reason: str) -> None:
        """End this rollout at a limit. It stays in its group, with the rewards that it has."""
        self.status, self.reason = "truncated", reason

    def drop(self, reason: str) -> None:
        """Leave this rollout out of training on purpose. Its group goes on without it; drop all of
        its rollouts to drop the group. Unlike failures, drops never stop the environment."""
        self.fail(reason, "cancelled")

    def base_urls(self) -> list[str]:
        """The base URLs of the trajectories of the current attempt."""
        return [agent.trajectory.base_url for agent in self.agents.values()]

    def endings(self) -> dict[str, Ending]:
        """How each of its trajectories ends, by base URL."""
        endings = {
            agent.trajectory.base_url: Ending(
                self.status,
                agent.reward,
                self.reason,
                advantages=(self.is_usable and agent.advantages) or None,
            )
            for agent in self.agents.values()
        }
        abandoned = Ending("cancelled", reason="started over after an outage", channel=RETRIED)
        return {**endings, **dict.fromkeys(self.abandoned, abandoned)}

    async def run(
        self, collect: Callable[[Item, "Rollout"], Awaitable[float | None]], item: Item
    ) -> None:
        """Run the author's `collect_trajectory` until it succeeds, fails or has no attempts left."""
        began = time.monotonic()
        try:
            while not await self._try(collect, item):
                await asyncio.sleep(PAUSE * self.attempt)
                await self._start_over()
        except asyncio.CancelledError:
            self.fail("the environment was stopped", "cancelled")
            raise
        finally:
            self.seconds = time.monotonic() - began

    async def _try(
        self, collect: Callable[[Item, "Rollout"], Awaitable[float | None]], item: Item
    ) -> bool:
        """False if there was an outage and there are attempts left."""
        requests_before = count_cancel_requests()
        try:
            async with asyncio.timeout(self.context.timeout_s) as limit:
                self._accept(await collect(item, self))
        except GatewayRefused as refused:
            self.fail(describe_error(refused))
        except EnvironmentFailed:
            raise
        except OUTAGES as error:
            self.fail(describe_error(error))
            return self.attempt >= self.context.attempts
        except TimeoutError as error:
            if limit.expired():
                self._end_at_time_limit()
            else:
                self.fail(describe_error(error))
        except AUTHOR_ERRORS as error:
            if is_requested_cancellation(error, requests_before):
                raise
            if self.overflowed:
                self.truncate(f"it outgrew the model's context: {describe_error(error)}")
                return True
            self.fail(describe_error(error))
            return not _has_only_outages(error) or self.attempt >= self.context.attempts
        return True

    def _end_at_time_limit(self) -> None:
        """A rollout that was waiting for an outage to end, or never got an answer, is no attempt at its
        item that could be compared with others."""
        reason = f"it took more than {self.context.timeout_s:g} s"
        outages = [agent.trajectory.recording.outage for agent in self.agents.values()]
        outage = next(filter(None, outages), None)
        if outage is not None:
            self.fail(f"{reason}, and was waiting for the model: {outage}")
        elif not self.calls:
            self.fail(reason)
        else:
            self.truncate(reason)

    def _accept(self, reward: float | None) -> None:
        """The return value of `collect_trajectory` is the reward of all agents that have none yet."""
        self._check_length()
        if not self.is_usable:
            return
        for agent in self.agents.values():
            agent.reward = reward if agent.reward is None else agent.reward
        last_call = self.calls[-1] if self.calls else None
        is_cut = last_call is not None and last_call.finish_reason == "length"
        if self.status == "completed" and (is_cut or self.overflowed):
            self.status = "truncated"

    async def _start_over(self) -> None:
        self.abandoned += self.base_urls()
        self.attempt += 1
        self.status, self.reason, self.metrics = "completed", None, {}
        self.agents = await self.context.name_agents()
        self.context.on_begin(self.base_urls())
        await self.context.register(self.agents)

    def _check_length(self) -> None:
        limit = self.context.max_token_length
        if self.is_usable and limit is not None and self.longest_call > limit:
            self.fail(
                f"a call of it has {self.longest_call:,} tokens, prompt and answer together; "
                f"--max-token-length allows {limit:,}"
            )

    def check(self) -> None:
        """Fail the rollout if no trainer could use it; leave unusable metrics out."""
        self.metrics = finite_numbers("rollout.metrics", self.metrics)
        self._check_length()
        if self.status not in get_args(Status):
            allowed = ", ".join(get_args(Status))
            self.fail(f"its status is {self.status!r}, which is none of {allowed}")
        for agent in self.agents.values():
            if agent.reward is None:
                continue
            try:
                agent.reward = float(agent.reward)
            except Exception:  # the reward may be any object of the author's
                self.fail(f"the reward of {agent.name} is {agent.reward!r}, not a number")
                return
            if not math.isfinite(agent.reward):
                self.fail(f"the reward of {agent.name} is {agent.reward}, not a finite number")
                return
        problems = filter(None, map(_find_advantage_problem, self.agents.values()))
        if self.is_usable and (problem := next(problems, None)):
            self.fail(problem)


def _find_advantage_problem(agent: Agent) -> str | None:
    """Why the trainer could not use the advantages; the gateway would refuse them."""
    tokens = {call.answer_id: call.tokens for call in agent.trajectory.calls}
    for answer_id, values in agent.advantages.items():
        if answer_id not in tokens:
            return f"advantages were set for {answer_id!r}, which is no answer to {agent.name}"
        if len(values) not in (1, tokens[answer_id]):
            return f"{len(values)} advantages were set for an answer of {tokens[answer_id]} tokens"
        if not all(map(math.isfinite, values)):
            return "an advantage is not a finite number"
    return None


def _has_only_outages(error: BaseException) -> bool:
    """Whether it is an exception group, as a TaskGroup raises it, that holds nothing but outages."""
    return isinstance(error, ExceptionGroup) and error.split(OUTAGES)[1] is None


async def run_all(
    collect: Callable[[Item, Rollout], Awaitable[float | None]],
    item: Item,
    rollouts: Sequence[Rollout],
) -> None:
    await asyncio.gather(*(rollout.run(collect, item) for rollout in rollouts))
