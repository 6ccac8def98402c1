"""Writing what changes the state, and having it changed when the log has it.

Everything that changes the state has a sequence number, is written under it, and is applied when the
log has it, in the order of the numbers: so the state in memory is always one that a rebuild gives, and
a client is told only what a rebuild will know. A record that the broker does not acknowledge is sent
again under its number until it does; whoever posted it waits, and nothing after it is applied.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from gateway.atropos.events import AnyEvent, encode_event
from gateway.atropos.neighbours import Neighbours
from gateway.atropos.queue import group_of
from gateway.atropos.retries import Delivery, Retries
from gateway.atropos.state import State
from gateway.atropos.turns import Turns
from gateway.atropos.wire import Posted
from pool.errors import BrokerUnavailable, Fatal, RecordTooLarge
from pool.producer import Producer
from pool.topics import ATROPOS, REWARDED
from schemas import AtroposEvent, Position, Record, ScoredGroup

log = logging.getLogger(__name__)

R = TypeVar("R")
SNAPSHOT_EVERY = 200
"""Events: so many are read, at most twice, by who begins anew."""


class Log:
    def __init__(
        self,
        producer: Producer,
        run: str,
        owner: str,
        state: State,
        retries: Retries,
        neighbours: Neighbours,
    ) -> None:
        self._producer = producer
        self._run = run
        self._owner = owner
        self._state = state
        self._retries = retries
        self._neighbours = neighbours
        self._turns = Turns(state.applied)
        self._events_under_way = 0
        self._events_since_snapshot = 0
        self._told = 0
        """Up to where records say that answers were sent."""
        self._last_group = 0
        self._pending: dict[int, float] = {}
        self._broken = asyncio.Event()

    @property
    def stalled_s(self) -> float:
        """How long the oldest record has waited for its acknowledgement."""
        oldest = next(iter(self._pending.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    @property
    def newest(self) -> int:
        """The sequence number that was given out last."""
        return self._turns.last

    @property
    def tells_all(self) -> bool:
        """Whether the log knows of every answer that was sent."""
        return self._told >= self._retries.settled(self._last_group)

    async def post(self, posted: Posted, delivery: Delivery) -> int | None:
        """Takes a group in; gives what `State.take_in` gives."""

        def number(sequence: int) -> None:
            self._last_group = sequence
            self._retries.number(delivery, sequence)

        fields = {
            "group_uid": os.urandom(16).hex(),
            "prompt_uid": self._neighbours.draw(),
            "fingerprint": posted.fingerprint,
            **posted.content,
        }
        try:
            return await self._take_in(fields, number)
        except RecordTooLarge:
            self._retries.forget(delivery)
            raise

    async def assemble(self, fields: dict[str, Any]) -> None:
        """Takes a group of agents in; nobody waits for an answer."""
        await self._take_in(fields, lambda sequence: None)

    async def _take_in(self, fields: dict[str, Any], number: Callable[[int], None]) -> int | None:
        async def write(sequence: int) -> tuple[ScoredGroup, Position]:
            number(sequence)
            record = ScoredGroup(
                run=self._run,
                sequence=sequence,
                created_at=_now(),
                settled=self._settled(sequence),
                **fields,
            )
            return record, await self._send(REWARDED, record.prompt_uid, sequence, record)

        def finish(written: tuple[ScoredGroup, Position]) -> int | None:
            return self._state.take_in(group_of(*written))

        return await self._turns.take(write, finish)

    async def happen(self, event: AnyEvent, result: Callable[[], R]) -> R:
        """Applies an event; `result` is looked at in the same moment, before anything else."""

        async def write(sequence: int) -> int:
            record = AtroposEvent(
                run=self._run,
                sequence=sequence,
                event=encode_event(event),
                settled=self._settled(sequence),
                created_at=_now(),
            )
            await self._send(ATROPOS, self._run, sequence, record)
            return sequence

        def finish(sequence: int) -> R:
            self._state.apply(sequence, event)
            return result()

        self._events_under_way += 1
        try:
            answer = await self._turns.take(write, finish)
        finally:
            self._events_under_way -= 1
        self._events_since_snapshot += 1
        if self._events_since_snapshot >= SNAPSHOT_EVERY and not self._events_under_way:
            await self.write_snapshot()
        return answer

    async def write_snapshot(self, stopped: bool = False) -> None:
        """While no other event is under way: those after it in the topic are those it lacks."""
        self._events_since_snapshot = 0
        owner = "" if stopped else self._owner
        snapshot = msgspec.structs.replace(self._state.snapshot(), owner=owner)
        await self.happen(snapshot, lambda: None)

    async def ended(self) -> None:
        """Raises when the producer cannot go on."""
        await self._broken.wait()
        raise Fatal("the Kafka producer cannot go on; see the log above")

    def _settled(self, sequence: int) -> int:
        self._told = self._retries.settled(sequence - 1)
        return self._told

    async def _send(self, topic: str, key: str, sequence: int, record: Record) -> Position:
        self._pending[sequence] = time.monotonic()
        try:
            while True:
                try:
                    return await self._producer.send(topic, key, record)
                except BrokerUnavailable as error:
                    log.warning("sending %s again: %s", _name(record), error)
                except Fatal:
                    self._broken.set()
                    raise
        finally:
            del self._pending[sequence]


def _name(record: Any) -> str:
    return f"{type(record).__name__} {record.sequence}"


def _now() -> int:
    return time.time_ns() // 1_000_000
