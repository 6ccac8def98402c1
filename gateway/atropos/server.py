"""What each route does to the state, and when its answer may be given.

An answer is given when the log has what it says. A batch is being sent from when it is formed until
its last byte is on its way and the log knows it: only if its response breaks off, or the server dies
before, it is sent again.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gateway.atropos import metrics
from gateway.atropos.http.scored_data import Posted
from gateway.atropos.log.retries import Delivery, Retries
from gateway.atropos.log.writer import Log
from gateway.atropos.state.env_status import env_status
from gateway.atropos.state.events import (
    Began,
    Env,
    Handed,
    Joined,
    Left,
    Registered,
    Reset,
    Resized,
    Settled,
    Training,
)
from gateway.atropos.state.queue import Group
from gateway.atropos.state.state import State
from gateway.errors import Unavailable

NOT_REGISTERED = {
    "status": "error",
    "message": "Trainer not registered. Call /register first.",
    "batch": [],
}
WAIT = {"status": "wait for trainer to start"}
GONE_AFTER = 15.0
"""Seconds of silence after which whoever registers under an environment's name is taken for it. It
polls ten times a second, and begins five seconds after it has registered."""
TELL_AFTER = 0.1
"""Seconds without a record until an event says which answers were sent."""


class Server:
    def __init__(
        self,
        state: State,
        retries: Retries,
        log: Log,
        silent_after_s: float,
        max_queue: int | None,
    ) -> None:
        self.state = state
        self.retries = retries
        self.log = log
        self._silent_after = silent_after_s
        self._max_queue = max_queue
        self._coming = 0
        """Groups that are being written."""
        self._joining = asyncio.Lock()
        self._heard: dict[int, float] = {}
        self._began = time.monotonic()
        self._forming = asyncio.Lock()
        self._being_sent: set[int] = set()

    async def register(self, training: Training) -> None:
        if self.state.training is None:
            await self.log.happen(Registered(training=training), lambda: None)

    async def register_env(self, env: Env) -> dict[str, Any]:
        async with self._joining:
            if not self.state.started:
                return WAIT
            joined = Joined(env=env, env_id=self._gone(env.desired_name))
            return await self.log.happen(joined, lambda: self._joined(joined))

    def _gone(self, name: str) -> int | None:
        """The first environment of this name that said that it leaves, or is not heard any more."""
        gone = self._silent_for(min(GONE_AFTER, self._silent_after))
        return next(
            (
                env_id
                for env_id, env in enumerate(self.state.envs)
                if env.desired_name == name and (not env.connected or env_id in gone)
            ),
            None,
        )

    def _joined(self, event: Joined) -> dict[str, Any]:
        """What an environment is told that has just registered."""
        training = self.state.training
        if training is None or not self.state.envs:
            return WAIT
        env_id = event.env_id if self.state.rejoins(event) else None
        env_id = len(self.state.envs) - 1 if env_id is None else env_id
        self._hear(env_id)
        return {
            "status": "success",
            "env_id": env_id,
            "wandb_name": self.state.envs[env_id].real_name,
            "checkpoint_dir": training.checkpoint_dir,
            "starting_step": self.state.step,
            "checkpoint_interval": training.save_checkpoint_interval,
            "num_steps": training.num_steps,
        }

    async def disconnect_env(self, env_id: int) -> dict[str, Any]:
        if self.state.env(env_id) is None:
            return {"status": "failure", "error": f"no environment has the id {env_id}"}
        await self.log.happen(Left(env_id=env_id), lambda: None)
        return {"status": "success"}

    async def status_env(self, env_id: int) -> dict[str, Any] | None:
        """None: there is no such environment."""
        self._hear(env_id)
        self._look_for_silence()
        found = env_status(self.state, env_id)
        if found is None:
            return None
        if found.group_size > self.state.envs[env_id].group_size:
            event = Resized(env_id=env_id, group_size=found.group_size)
            await self.log.happen(event, lambda: None)
        return found.answer

    async def post(
        self, groups: Sequence[Posted], deliveries: Sequence[Delivery]
    ) -> list[int | None]:
        """Takes groups in, without those that the log has already; for each, the size of its buffer
        or None. All of them are refused when there is no room."""
        for group in groups:
            if group.env_id is not None:
                self._hear(group.env_id)
        new = [n for n, delivery in enumerate(deliveries) if delivery.sequence is None]
        if len(new) < len(groups):
            metrics.retries.inc(len(groups) - len(new))
        taken = await self._take_in([groups[n] for n in new], [deliveries[n] for n in new])
        sizes = dict(zip(new, taken, strict=True))
        return [
            sizes[n] if n in sizes else self._as_answered(group) for n, group in enumerate(groups)
        ]

    def _check_room(self, groups: Sequence[Posted], most: int) -> None:
        """What waits in a buffer may be what completes the next batch, so it does not count with the
        queue; a buffer that is as long by itself never sums up."""
        state = self.state
        formed = sum(len(batch) for batch in state.unhanded.values())
        envs = {posted.env_id for posted in groups}
        buffers = (buffer for env_id, buffer in state.buffers.items() if env_id in envs)
        fullest = max((len(buffer.groups) for buffer in buffers), default=0)
        waiting = max(len(state.queue) + formed + self._coming, fullest)
        if waiting >= most:
            metrics.refused.inc(len(groups))
            raise Unavailable(
                f"{waiting} groups wait for the trainer, and --max-queue is {most}; try again later"
            )

    async def _take_in(
        self, groups: Sequence[Posted], deliveries: Sequence[Delivery]
    ) -> list[int | None]:
        if not groups:
            return []
        if self._max_queue is not None:
            self._check_room(groups, self._max_queue)
        self._coming += len(groups)
        try:
            sizes = await self.log.post(groups, deliveries)
        finally:
            self._coming -= len(groups)
        metrics.groups.inc(len(groups))
        metrics.sequences.inc(sum(group.size for group in groups))
        return sizes

    def _as_answered(self, posted: Posted) -> int | None:
        """What a group that is here already would be told."""
        env = None if posted.env_id is None else self.state.env(posted.env_id)
        if env is None or posted.env_id is None or env.group_size == posted.size:
            return None
        buffer = self.state.buffers.get(posted.env_id)
        return buffer.sequences if buffer else 0

    async def batch(self) -> tuple[int, list[Group]] | None:
        """A batch that nobody else is being sent, and its number: to be given to `handed`."""
        async with self._forming:
            if not self.state.started:
                await self.log.happen(Began(), lambda: None)
            if self._next_unsent() is None:
                self._look_for_silence()
                if formed := self.state.next_batch():
                    await self.log.happen(formed, lambda: None)
            number = self._next_unsent()
            if number is None:
                return None
            self._being_sent.add(number)
            return number, self.state.unhanded[number]

    def _next_unsent(self) -> int | None:
        return next((n for n in self.state.unhanded if n not in self._being_sent), None)

    async def handed(self, number: int, sent: bool) -> None:
        try:
            if sent:
                await self.log.happen(Handed(number=number), lambda: None)
                metrics.batches.inc()
            else:
                metrics.broken_off.inc()
        finally:
            self._being_sent.discard(number)

    async def reset(self) -> None:
        await self.log.happen(Reset(), self._heard.clear)

    def _hear(self, env_id: int) -> None:
        if 0 <= env_id < len(self.state.envs):
            self._heard[env_id] = time.monotonic()

    def _look_for_silence(self) -> None:
        """Who has been silent for long is taken to be gone, until it is heard again."""
        self.state.silent = self._silent_for(self._silent_after)

    def _silent_for(self, seconds: float) -> frozenset[int]:
        now = time.monotonic()
        return frozenset(
            env_id
            for env_id in range(len(self.state.envs))
            if now - self._heard.get(env_id, self._began) > seconds
        )

    async def tell_for_ever(self) -> None:
        """Sees to it that the log knows which answers were sent, also when nothing else is written."""
        newest = 0
        while True:
            await asyncio.sleep(TELL_AFTER)
            # While records follow each other, each tells of the answers before it.
            if self.log.newest == newest and not self.log.tells_all:
                await self.log.happen(Settled(), lambda: None)
            newest = self.log.newest

    async def stop(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self.log.write_snapshot(stopped=True)
