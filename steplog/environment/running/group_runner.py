"""Runs groups: their rollouts are admitted, collected, scored together and closed together.

No data is thrown away. A group that may not start yet waits with its item. A group that could not be
closed because the gateway was down is closed when the gateway is back.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Generic
from uuid import uuid4

from steplog.environment.author_code import (
    AUTHOR_ERRORS,
    count_cancel_requests,
    describe_error,
    is_requested_cancellation,
    required_call,
)
from steplog.environment.backends.backend import Backend, Ending, TrajectoryRegistration
from steplog.environment.base import BaseEnvironment
from steplog.environment.errors import EnvironmentFailed, GatewayRefused
from steplog.environment.rollouts.agents import GroupContext
from steplog.environment.rollouts.group import Group, reward_cut_off_rollouts
from steplog.environment.rollouts.rollout import Item, Rollout
from steplog.environment.running.journal import Journal

CANCEL_LIMIT_S = 5.0
"""Seconds in which a group that is being stopped may tell the gateway about it."""
KILLED = "the environment was killed"
TRAIN = "train"
"""The channel whose groups are trained."""
NOTHING_TO_COMPLETE = (404, 409)
"""The gateway's statuses for a trajectory that never started, or is completed already."""


class GroupRunner(Generic[Item]):
    """Runs the groups of one environment in one channel."""

    def __init__(
        self,
        environment: BaseEnvironment[Item],
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
        # One group at a time asks for admission: the others would only be refused as well.
        self._admission = asyncio.Lock()

    async def run(self, number: int, item: Item) -> Group[Item]:
        prompt_uid = f"{self._environment.title()}-{number}-{uuid4().hex[:8]}"
        group = Group(number, item, prompt_uid)
        try:
            await self._start(group)
            await self._collect_and_score(group)
        except asyncio.CancelledError:
            await self._cancel(group)
            raise
        endings = group.endings()
        self._journal.record_endings(number, endings)
        await complete_all(self.backend, endings)
        self._journal.record_done(number, self._environment.state())
        return group

    async def _start(self, group: Group[Item]) -> None:
        context = self._make_context(group)
        agents = await asyncio.gather(*(context.name_agents() for _ in range(self._size)))
        model = self._environment.settings.model
        rollouts = [Rollout(context, named, model) for named in agents]
        context.on_begin([url for rollout in rollouts for url in rollout.base_urls()])
        async with self._admission:
            for url in rollouts[0].base_urls():
                group.waited_s += await self.backend.register(url, context.registration)
        group.rollouts = rollouts
        await asyncio.gather(*(context.register(rollout.agents) for rollout in rollouts[1:]))

    def _make_context(self, group: Group[Item]) -> GroupContext:
        settings, title = self._environment.settings, self._environment.title()
        with required_call("metadata()"):
            metadata = dict(self._environment.metadata(group.item))
            json.dumps(metadata)
        return GroupContext(
            backend=self.backend,
            registration=TrajectoryRegistration(
                channel=self._channel,
                group_size=self._size,
                deadline_s=settings.deadline_s,
                metadata={"environment": title, **metadata, **settings.share},
            ),
            prompt_uid=group.prompt_uid,
            agents=self._environment.agents,
            timeout_s=settings.rollout_timeout_s,
            attempts=settings.attempts,
            on_begin=lambda urls: self._journal.record_start(group.number, urls),
            max_token_length=settings.max_token_length if self._channel == TRAIN else None,
        )

    async def _collect_and_score(self, group: Group[Item]) -> None:
        item, rollouts = group.item, group.rollouts
        settings = self._environment.settings
        limit_s, truncated_reward = settings.deadline_s, settings.truncated_reward
        requests_before = count_cancel_requests()
        try:
            async with asyncio.timeout(limit_s) as limit:
                await self._environment.collect_trajectories(item, rollouts)
                # Before `score`, which may compare rewards, and after it, which may have given them.
                reward_cut_off_rollouts(rollouts, truncated_reward)
                await self._environment.score(item, rollouts)
                reward_cut_off_rollouts(rollouts, truncated_reward)
        except EnvironmentFailed:
            raise
        except AUTHOR_ERRORS as error:
            if is_requested_cancellation(error, requests_before):
                raise
            is_late = limit.expired()
            reason = f"it took more than {limit_s:g} s" if is_late else describe_error(error)
            for rollout in rollouts:
                rollout.fail(f"its group failed: {reason}")
        for rollout in rollouts:
            rollout.check()

    async def _cancel(self, group: Group[Item]) -> None:
        """The process is ending. The next one draws the item again."""
        for rollout in group.rollouts:
            rollout.fail("the environment was stopped", "cancelled")
        with suppress(EnvironmentFailed, TimeoutError):
            async with asyncio.timeout(CANCEL_LIMIT_S):
                await complete_all(self.backend, group.endings())
                self._journal.record_cancelled(group.number)


async def complete_all(backend: Backend, endings: Mapping[str, Ending]) -> None:
    await asyncio.gather(*(_complete(backend, url, ending) for url, ending in endings.items()))


async def _complete(backend: Backend, url: str, ending: Ending) -> None:
    try:
        await backend.complete(url, ending)
    except GatewayRefused as refused:
        # It has expired, or an earlier process completed it: that ending holds.
        if refused.status not in NOTHING_TO_COMPLETE:
            raise


async def close_unfinished(
    backend: Backend, journal: Journal, registration: TrajectoryRegistration
) -> None:
    """Close what an earlier process left open. Groups that had ended get their endings, all others are
    cancelled."""
    for number, item in sorted(journal.open.items()):
        if item.endings is not None:
            await complete_all(backend, item.endings)
            journal.record_done(number, journal.state)
        elif item.urls:
            await _cancel_all(backend, item.urls, registration)
            journal.record_cancelled(number)


async def _cancel_all(
    backend: Backend, urls: Sequence[str], registration: TrajectoryRegistration
) -> None:
    """If any of them had started, the group counts as in flight until all of them have ended. So those
    that had not started are registered first."""
    ending = Ending("cancelled", reason=KILLED)
    unknown = [url for url in urls if not await _is_completed(backend, url, ending)]
    if len(unknown) < len(urls):
        for url in unknown:
            await backend.register(url, registration)
            await _complete(backend, url, ending)


async def _is_completed(backend: Backend, url: str, ending: Ending) -> bool:
    """Complete the trajectory; False if the gateway does not know it."""
    try:
        await backend.complete(url, ending)
    except GatewayRefused as refused:
        return refused.status != 404
    return True
