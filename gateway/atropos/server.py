"""What each route does to the state, and when its answer may be sent.

A client gets its answer only after the log has what the answer says. A batch is leased to the client
that it is sent to, until that client has read all of it and the log knows that. If the client goes
before, or the server dies, the batch is sent again.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any

from gateway.atropos import metrics
from gateway.atropos.log.retries import Delivery, RetryDetector
from gateway.atropos.log.writer import LogWriter
from gateway.atropos.scored_data import PostedGroup
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
from gateway.atropos.state.queue import QueuedGroup
from gateway.atropos.state.state import AtroposState
from gateway.errors import Conflict, Unavailable

NOT_REGISTERED = {
    "status": "error",
    "message": "Trainer not registered. Call /register first.",
    "batch": [],
}
OWN_TRAINER = (
    "The groups of this run are trained by `steplog train`, so no other trainer may register, take "
    "batches or reset them. Start the server without --train and with another --run for that."
)
WAIT = {"status": "wait for trainer to start"}
REPLACED_AFTER_S = 15.0
"""After this much silence of an environment, the same one may register again from the same machine. An
environment polls ten times a second, starting five seconds after it has registered."""
RECORD_AFTER_S = 0.1
"""Time without a record after which an event records which answers were sent."""


class AtroposServer:
    def __init__(
        self,
        state: AtroposState,
        retries: RetryDetector,
        writer: LogWriter,
        silent_after_s: float,
        max_queue: int | None,
        has_own_trainer: bool = False,
    ) -> None:
        self.state = state
        self.retries = retries
        self._writer = writer
        self._silent_after_s = silent_after_s
        self._max_queue = max_queue
        self.has_own_trainer = has_own_trainer
        """Whether steplog's own trainer takes the groups, and nobody may pull them."""
        self._pending_groups = 0
        """Groups that are being written."""
        self._registering_env = asyncio.Lock()
        self._last_heard: dict[int, float] = {}
        self._began = time.monotonic()
        self._forming_batch = asyncio.Lock()
        self._leased: set[int] = set()
        """Numbers of batches that clients are being sent, or may not have read yet."""
        self._receipts: set[asyncio.Task[None]] = set()

    async def register(self, training: Training) -> None:
        self._refuse_with_own_trainer()
        if self.state.training is None:
            await self._writer.append_event(Registered(training=training), lambda: None)

    async def register_env(self, env: Env) -> dict[str, Any]:
        async with self._registering_env:
            if not self.state.started:
                return WAIT
            joined = Joined(env=env, env_id=self._find_predecessor(env))
            return await self._writer.append_event(joined, lambda: self._answer_to_env(joined))

    def _find_predecessor(self, env: Env) -> int | None:
        """The first registration of the same environment whose process is gone. One that is merely
        quiet may be busy, so only a process of its own machine may take its place."""
        gone = self._silent_for(self._silent_after_s)
        quiet = self._silent_for(min(REPLACED_AFTER_S, self._silent_after_s))
        for env_id, earlier in enumerate(self.state.envs):
            is_gone = not earlier.connected or env_id in gone
            has_restarted = env_id in quiet and earlier.host == env.host
            if earlier.is_same_environment(env) and (is_gone or has_restarted):
                return env_id
        return None

    def _answer_to_env(self, event: Joined) -> dict[str, Any]:
        """The answer to an environment that has just registered."""
        training = self.state.training
        if training is None or not self.state.envs:
            return WAIT
        env_id = event.env_id if self.state.rejoins(event) else None
        env_id = len(self.state.envs) - 1 if env_id is None else env_id
        self._note_activity(env_id)
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
            return {"status": "failure", "error": f"No environment has the id {env_id}."}
        await self._writer.append_event(Left(env_id=env_id), lambda: None)
        return {"status": "success"}

    async def status_env(self, env_id: int) -> dict[str, Any] | None:
        """Returns None if there is no such environment."""
        self._note_activity(env_id)
        self._update_silent()
        status = env_status(self.state, env_id)
        if status is None:
            return None
        if status.group_size > self.state.envs[env_id].group_size:
            event = Resized(env_id=env_id, group_size=status.group_size)
            await self._writer.append_event(event, lambda: None)
        return status.answer

    async def post(
        self, groups: Sequence[PostedGroup], deliveries: Sequence[Delivery]
    ) -> list[int | None]:
        """Appends the groups that the log does not have yet; returns for each the size of its buffer,
        or None if it is in the queue. All of them are refused when the queue is full."""
        for group in groups:
            if group.env_id is not None:
                self._note_activity(group.env_id)
        new = [n for n, delivery in enumerate(deliveries) if delivery.sequence is None]
        if len(new) < len(groups):
            metrics.retries.inc(len(groups) - len(new))
        taken = await self._append([groups[n] for n in new], [deliveries[n] for n in new])
        sizes = dict(zip(new, taken, strict=True))
        return [
            sizes[n] if n in sizes else self._repeated_answer(group)
            for n, group in enumerate(groups)
        ]

    def _check_room(self, groups: Sequence[PostedGroup], limit: int) -> None:
        """Buffered groups are not added to the queue's length, because the next post may complete them;
        but a buffer that alone is as long as the limit will never be completed."""
        state = self.state
        formed = sum(len(batch) for batch in state.unhanded.values())
        envs = {posted.env_id for posted in groups}
        buffers = (buffer for env_id, buffer in state.buffers.items() if env_id in envs)
        fullest = max((len(buffer.groups) for buffer in buffers), default=0)
        waiting = max(len(state.queue) + formed + self._pending_groups, fullest)
        if waiting >= limit:
            metrics.refused.inc(len(groups))
            raise Unavailable(
                f"{waiting} groups wait for the trainer (--max-queue is {limit}). Try again later."
            )

    async def _append(
        self, groups: Sequence[PostedGroup], deliveries: Sequence[Delivery]
    ) -> list[int | None]:
        if not groups:
            return []
        if self._max_queue is not None:
            self._check_room(groups, self._max_queue)
        self._pending_groups += len(groups)
        try:
            sizes = await self._writer.append_posted(groups, deliveries)
        finally:
            self._pending_groups -= len(groups)
        metrics.groups.inc(len(groups))
        metrics.sequences.inc(sum(group.size for group in groups))
        return sizes

    def _repeated_answer(self, posted: PostedGroup) -> int | None:
        """The answer to a group that the log has already."""
        env = None if posted.env_id is None else self.state.env(posted.env_id)
        if env is None or posted.env_id is None or env.group_size == posted.size:
            return None
        buffer = self.state.buffers.get(posted.env_id)
        return buffer.sequences if buffer else 0

    async def batch(self) -> tuple[int, list[QueuedGroup]] | None:
        """Leases a batch that no other client has: its number and groups. Pass the number to
        `await_receipt` or `release_batch` afterwards."""
        async with self._forming_batch:
            if not self.state.started:
                await self._writer.append_event(Began(), lambda: None)
            if self._next_unleased() is None:
                self._update_silent()
                if formed := self.state.next_batch():
                    await self._writer.append_event(formed, lambda: None)
            number = self._next_unleased()
            if number is None:
                return None
            self._leased.add(number)
            return number, self.state.unhanded[number]

    def _next_unleased(self) -> int | None:
        return next((n for n in self.state.unhanded if n not in self._leased), None)

    def await_receipt(self, number: int, receipt: Awaitable[bool]) -> None:
        """Ends the lease of a batch when it is known whether its client has read it."""
        task = asyncio.create_task(self._end_lease(number, receipt), name=f"batch {number}")
        self._receipts.add(task)
        task.add_done_callback(self._receipts.discard)

    async def _end_lease(self, number: int, receipt: Awaitable[bool]) -> None:
        if not await receipt:
            self.release_batch(number)
            return
        try:
            await self._writer.append_event(Handed(number=number), lambda: None)
            metrics.batches.inc()
        finally:
            self._leased.discard(number)

    def release_batch(self, number: int) -> None:
        """The client has gone: the next one that asks gets the batch."""
        metrics.broken_off.inc()
        self._leased.discard(number)

    def _refuse_with_own_trainer(self) -> None:
        if self.has_own_trainer:
            raise Conflict(OWN_TRAINER)

    async def reset(self) -> None:
        self._refuse_with_own_trainer()
        await self._writer.append_event(Reset(), self._last_heard.clear)

    def _note_activity(self, env_id: int) -> None:
        if 0 <= env_id < len(self.state.envs):
            self._last_heard[env_id] = time.monotonic()

    def _update_silent(self) -> None:
        """An environment that has been silent for long counts as gone until it is heard again."""
        self.state.silent = self._silent_for(self._silent_after_s)

    def _silent_for(self, seconds: float) -> frozenset[int]:
        now = time.monotonic()
        return frozenset(
            env_id
            for env_id in range(len(self.state.envs))
            if now - self._last_heard.get(env_id, self._began) > seconds
        )

    async def record_sent_answers(self) -> None:
        """Records which answers were sent when no other record does; runs until cancelled."""
        newest = 0
        while True:
            await asyncio.sleep(RECORD_AFTER_S)
            # While records follow each other, each one says which answers before it were sent.
            if self._writer.newest == newest and not self._writer.has_recorded_all_answers:
                await self._writer.append_event(Settled(), lambda: None)
            newest = self._writer.newest

    async def stop(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                if self._receipts:
                    await asyncio.wait(self._receipts)
                await self._writer.write_snapshot(stopped=True)
