"""Agents that know nothing of training: they ask an OpenAI-style URL, and say when they are done.

A group's first call may be told to come back later (429). The client does so, as it does for anybody.
"""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import openai

from tests.trainer.learning.task import QUESTIONS, TOKENS

AT_ONCE = 6
"""Groups that are made at the same time."""
TRIES = 1_000
"""Waiting for admission is no failure; the run has a limit of its own."""


class Agents:
    """Make groups of rollouts, one after another, until they are stopped."""

    def __init__(self, gateway: str, name: str, group_size: int) -> None:
        self._gateway = gateway
        self._name = name
        self._group_size = group_size
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="agents")
        self._work: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._work = self._loop.create_task(self._make_groups())
        self._thread.start()

    def stop(self) -> None:
        assert self._work is not None
        self._loop.call_soon_threadsafe(self._work.cancel)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        assert self._work is not None
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._work)
        except BaseException as failure:
            self.failure = failure

    async def _make_groups(self) -> None:
        async with (
            openai.AsyncOpenAI(api_key="none", base_url=self._gateway, max_retries=TRIES) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(AT_ONCE):
                tasks.create_task(self._one_after_another(client))

    async def _one_after_another(self, client: openai.AsyncOpenAI) -> None:
        for number in self._numbers:
            await self._group(client, number)

    async def _group(self, client: openai.AsyncOpenAI, number: int) -> None:
        prompt = f"{self._name}-{number}"
        uids = [f"{prompt}-{place}" for place in range(self._group_size)]
        rollouts = [client.with_options(base_url=f"{self._gateway}/{u}/{prompt}/v1") for u in uids]
        # One asks for admission, and the group has it.
        await rollouts[0].post("/register_trajectory", body={}, cast_to=object)
        question = QUESTIONS[number % len(QUESTIONS)]
        await asyncio.gather(*(_rollout(rollout, question) for rollout in rollouts))


async def _rollout(client: openai.AsyncOpenAI, question: str) -> None:
    await client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": question}],
        max_tokens=TOKENS,
        temperature=1.0,
    )
    await client.post("/complete_trajectory", body={}, cast_to=object)


@contextmanager
def working_agents(gateway: str, name: str, group_size: int) -> Iterator[Agents]:
    agents = Agents(gateway, name, group_size)
    agents.start()
    try:
        yield agents
    finally:
        agents.stop()
