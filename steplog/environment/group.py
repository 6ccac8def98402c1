"""The life of a group: its rollouts are admitted, led, scored together, and closed together.

Nothing that was said is thrown away: a group that may not begin waits with its item; one that could not
be closed, because the gateway was away, is closed when it is back.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Generic
from uuid import uuid4

from steplog.environment.authors import RAISED, blamed, cancellations, is_asked_to_end, told
from steplog.environment.client import About, Backend, Ending
from steplog.environment.errors import EnvironmentFailed, GatewayRefused
from steplog.environment.journal import Journal
from steplog.environment.rollout import Item, Place, Rollout

if TYPE_CHECKING:
    from steplog.environment.environment import Environment

LAST_WORDS_S = 5.0
"""Seconds in which a group that is stopped may tell the gateway so."""
KILLED = "the environment was killed"
SETTLED = (404, 409)
"""What a gateway says of a trajectory that never began, or is completed already."""


@dataclass
class Group(Generic[Item]):
    """The rollouts of an item."""

    number: int
    item: Item
    prompt_uid: str
    rollouts: list[Rollout] = field(default_factory=list)
    waited_s: float = 0.0
    """Seconds that it was told to wait before it began."""

    @property
    def rewards(self) -> list[float]:
        return [
            rollout.reward
            for rollout in self.rollouts
            if rollout.is_usable and rollout.reward is not None
        ]

    @property
    def pace(self) -> float | None:
        """Seconds per generated token, as its rollouts saw it."""
        calls = [call for rollout in self.rollouts for call in rollout.calls]
        tokens = sum(call.tokens for call in calls)
        return sum(call.seconds for call in calls) / tokens if tokens else None

    @property
    def failure(self) -> str | None:
        """Why nothing in it can be used; None: something can."""
        if any(rollout.is_usable for rollout in self.rollouts):
            return None
        return next((r.reason for r in self.rollouts if r.reason), "nothing was said")

    def advantage(self, rollout: Rollout) -> float | None:
        """As GRPO compares it with the others; the trainer computes its own."""
        rewards = self.rewards
        if rollout.reward is None or not rollout.is_usable or len(rewards) < 2:
            return None
        return (rollout.reward - fmean(rewards)) / (pstdev(rewards) + 1e-6)

    def line(self) -> dict[str, Any]:
        """The group as JSON."""
        return {
            "number": self.number,
            "prompt_uid": self.prompt_uid,
            "item": as_json(self.item),
            "rollouts": [self._rollout(rollout) for rollout in self.rollouts],
        }

    def _rollout(self, rollout: Rollout) -> dict[str, Any]:
        return {
            "reward": rollout.reward,
            "rewards": {agent.name: agent.reward for agent in rollout.agents.values()},
            "advantage": self.advantage(rollout),
            "status": rollout.status,
            "reason": rollout.reason,
            "metrics": rollout.metrics,
            "seconds": round(rollout.seconds, 3),
            "tokens": sum(call.tokens for call in rollout.calls),
            "conversations": rollout.conversations(),
            "speakers": [name for name, _ in rollout.spoken()],
        }


def as_json(item: Any) -> Any:
    """The item, or what it prints as where JSON has no form for it."""
    try:
        return json.loads(json.dumps(item, allow_nan=False))
    except (TypeError, ValueError):
        return str(item)


class Leader(Generic[Item]):
    """Leads the groups of one environment in one channel."""

    def __init__(
        self,
        environment: "Environment[Item]",
        backend: Backend,
        journal: Journal,
        channel: str,
        size: int,
    ) -> None:
        self._environment = environment
        self.backend = backend
        self._journal = journal
        self._channel = channel
        self._size = size
        # One group asks for admission at a time: the others would only be refused as well.
        self._door = asyncio.Lock()

    async def lead(self, number: int, item: Item) -> Group[Item]:
        prompt_uid = f"{self._environment.title()}-{number}-{uuid4().hex[:8]}"
        group = Group(number, item, prompt_uid)
        try:
            await self._begin(group)
            await self._play(group)
        except asyncio.CancelledError:
            await self._drop(group)
            raise
        ends = endings(group.rollouts)
        self._journal.ended(number, ends)
        await close(self.backend, ends)
        self._journal.finished(number, self._environment.state())
        return group

    async def _begin(self, group: Group[Item]) -> None:
        settings = self._environment.settings
        with blamed("metadata()"):
            metadata = dict(self._environment.metadata(group.item))
            json.dumps(metadata)
        about = About(
            channel=self._channel,
            group_size=self._size,
            deadline_s=settings.deadline_s,
            metadata={"environment": self._environment.title(), **metadata},
        )
        place = Place(
            backend=self.backend,
            about=about,
            prompt_uid=group.prompt_uid,
            agents=self._environment.agents,
            timeout_s=settings.rollout_timeout_s,
            attempts=settings.attempts,
            begun=lambda urls: self._journal.begun(group.number, urls),
        )
        named = await asyncio.gather(*(place.name_agents() for _ in range(self._size)))
        rollouts = [Rollout(place, agents, settings.model) for agents in named]
        place.begun([url for rollout in rollouts for url in urls(rollout)])
        async with self._door:
            for url in urls(rollouts[0]):
                group.waited_s += await self.backend.register(url, about)
        group.rollouts = rollouts
        await asyncio.gather(*(place.register(rollout.agents) for rollout in rollouts[1:]))

    async def _play(self, group: Group[Item]) -> None:
        item, rollouts = group.item, group.rollouts
        limit_s, before = self._environment.settings.deadline_s, cancellations()
        try:
            async with asyncio.timeout(limit_s) as limit:
                await self._environment.collect_trajectories(item, rollouts)
                await self._environment.score(item, rollouts)
        except EnvironmentFailed:
            raise
        except RAISED as error:
            if is_asked_to_end(error, before):
                raise
            why = f"it took over {limit_s:g} s" if limit.expired() else told(error)
            for rollout in rollouts:
                rollout.fail(f"its group failed: {why}")
        for rollout in rollouts:
            rollout.check()

    async def _drop(self, group: Group[Item]) -> None:
        """The process ends in the middle of it; its item is drawn again by the next one."""
        for rollout in group.rollouts:
            rollout.fail("the environment was stopped", "cancelled")
        with suppress(EnvironmentFailed, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await close(self.backend, endings(group.rollouts))
                self._journal.dropped(group.number)


def urls(rollout: Rollout) -> list[str]:
    return [agent.trajectory.base_url for agent in rollout.agents.values()]


def endings(rollouts: Sequence[Rollout]) -> dict[str, Ending]:
    return {url: end for rollout in rollouts for url, end in rollout.endings().items()}


async def close(backend: Backend, ends: dict[str, Ending]) -> None:
    await asyncio.gather(*(_complete(backend, url, end) for url, end in ends.items()))


async def _complete(backend: Backend, url: str, end: Ending) -> None:
    try:
        await backend.complete(url, end)
    except GatewayRefused as refused:
        # It expired, or an earlier life has completed it: then that is how it ended.
        if refused.status not in SETTLED:
            raise


async def settle(backend: Backend, journal: Journal, about: About) -> None:
    """Closes what an earlier life left open: what had ended as it had, the rest as cancelled."""
    for number, left in sorted(journal.open.items()):
        if left.ends is not None:
            await close(backend, left.ends)
            journal.finished(number, journal.state)
        elif left.urls:
            await _cancel(backend, left.urls, about)
            journal.dropped(number)


async def _cancel(backend: Backend, left: Sequence[str], about: About) -> None:
    """If any of them began, the group has a place; it gives it back when all have ended."""
    end = Ending("cancelled", reason=KILLED)
    unknown = [url for url in left if not await _is_known(backend, url, end)]
    if len(unknown) < len(left):
        for url in unknown:
            await backend.register(url, about)
            await _complete(backend, url, end)


async def _is_known(backend: Backend, url: str, end: Ending) -> bool:
    try:
        await backend.complete(url, end)
    except GatewayRefused as refused:
        return refused.status != 404
    return True
