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
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.atropos.http.scored_data import Posted
from gateway.atropos.log.prompt_uids import Neighbours
from gateway.atropos.log.retries import Delivery, Retries
from gateway.atropos.log.sequence import Turns
from gateway.atropos.state.events import AnyEvent, encode_event
from gateway.atropos.state.queue import group_of
from gateway.atropos.state.state import State
from pool.producers.output import Output
from pool.producers.producer import Producer
from pool.topics import ATROPOS, REWARDED
from schemas import AtroposEvent, Position, ScoredGroup
from servicekit.errors import BrokerUnavailable, Fatal, RecordTooLarge

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
        self._ends: dict[int, dict[int, int]] = {}
        """By turn of groups, the oldest first: where the log's partitions ended when it began."""
        self._events_under_way = 0
        self._events_since_snapshot = 0
        self._may_happen = asyncio.Event()
        self._may_happen.set()
        self._told = 0
        """Up to where records say that answers were sent."""
        self._last_group = 0
        self._broken = asyncio.Event()

    @property
    def stalled_s(self) -> float:
        """How long the oldest record has waited for its acknowledgement."""
        return self._turns.longest_s

    @property
    def newest(self) -> int:
        """The sequence number that was given out last."""
        return self._turns.last

    @property
    def tells_all(self) -> bool:
        """Whether the log knows of every answer that was sent."""
        return self._told >= self._retries.settled(self._last_group)

    async def post(
        self, posted: Sequence[Posted], deliveries: Sequence[Delivery]
    ) -> list[int | None]:
        """Takes groups in, all of them or none; gives for each what `State.take_in` gives."""
        try:
            return await self._take_in([self._named(one) for one in posted], deliveries)
        except RecordTooLarge:
            self._retries.forget(deliveries)
            raise

    def _named(self, posted: Posted) -> dict[str, Any]:
        return {
            "group_uid": os.urandom(16).hex(),
            "prompt_uid": self._neighbours.draw(),
            "fingerprint": posted.fingerprint,
            **posted.content,
        }

    async def assemble(self, fields: dict[str, Any]) -> None:
        """Takes a group of agents in; nobody waits for an answer."""
        await self._take_in([fields], ())

    async def _take_in(
        self, contents: Sequence[dict[str, Any]], deliveries: Sequence[Delivery]
    ) -> list[int | None]:
        first = self._turns.begin(len(contents))
        self._ends[first] = dict(self._state.ends)
        try:
            if deliveries:
                self._last_group = self._turns.last
                self._retries.number(deliveries, first)
            settled, now = self._settled(first), _now()
            records = [
                ScoredGroup(run=self._run, sequence=n, created_at=now, settled=settled, **fields)
                for n, fields in enumerate(contents, first)
            ]
            outputs = [self._producer.output(REWARDED, r.prompt_uid, r) for r in records]
            places = await self._send(outputs)
            await self._turns.come(first)
            return [
                self._state.take_in(group_of(*one)) for one in zip(records, places, strict=True)
            ]
        finally:
            del self._ends[first]
            self._turns.end(first)

    async def happen(self, event: AnyEvent, result: Callable[[], R]) -> R:
        """Applies an event; `result` is looked at in the same moment, before anything else."""
        await self._may_happen.wait()
        answer = await self._apply(event, result)
        self._events_since_snapshot += 1
        if self._events_since_snapshot >= SNAPSHOT_EVERY and not self._events_under_way:
            await self.write_snapshot()
        return answer

    async def _apply(self, event: AnyEvent, result: Callable[[], R]) -> R:
        sequence = self._turns.begin()
        self._events_under_way += 1
        try:
            record = AtroposEvent(
                run=self._run,
                sequence=sequence,
                event=encode_event(event),
                settled=self._settled(sequence),
                created_at=_now(),
            )
            await self._send([self._producer.output(ATROPOS, self._run, record)])
            await self._turns.come(sequence)
            self._state.apply(sequence, event)
            return result()
        finally:
            self._turns.end(sequence)
            self._events_under_way -= 1

    async def write_snapshot(self, stopped: bool = False) -> None:
        """While no other event is under way, and none begins before the log has it: so those that lie
        after it in the topic are those that it lacks, however often it must be sent."""
        self._events_since_snapshot = 0
        owner = "" if stopped else self._owner
        snapshot = self._state.snapshot()
        floors = self._floors(snapshot.floors)
        snapshot = msgspec.structs.replace(snapshot, owner=owner, floors=floors)
        self._may_happen.clear()
        try:
            await self._apply(snapshot, lambda: None)
        finally:
            self._may_happen.set()

    def _floors(self, floors: dict[int, int]) -> dict[int, int]:
        """Those of the state, and of groups that are under way: one that waits for its turn may lie
        before all that is in the state, if others had to be sent again."""
        oldest = next(iter(self._ends.values()), floors)
        return {partition: min(at, oldest.get(partition, 0)) for partition, at in floors.items()}

    async def ended(self) -> None:
        """Raises when the producer cannot go on."""
        await self._broken.wait()
        raise Fatal("the Kafka producer cannot go on; see the log above")

    def _settled(self, sequence: int) -> int:
        self._told = self._retries.settled(sequence - 1)
        return self._told

    async def _send(self, outputs: Sequence[Output]) -> list[Position]:
        """Sends all of them at the same time; returns their positions."""
        try:
            if len(outputs) == 1:
                return [await self._deliver(outputs[0])]
            return await asyncio.gather(*map(self._deliver, outputs))
        except Fatal:
            self._broken.set()
            raise

    async def _deliver(self, output: Output) -> Position:
        while True:
            try:
                return await self._producer.deliver(output)
            except BrokerUnavailable as error:
                log.warning("Sending a record to %s again: %s", output.topic, error)


def _now() -> int:
    return time.time_ns() // 1_000_000
