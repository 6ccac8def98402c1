"""Writes every change of the state to the log, and applies it once the log has it.

Each change has a sequence number, is written under it, and is applied in the order of these numbers
after Kafka acknowledged it. So the state in memory is always one that a rebuild would yield, and a
client is told only what survives a restart. A record that is not acknowledged is sent again under the
same number until it is; its client waits meanwhile, and no later change is applied.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.atropos.log.prompt_uids import PromptUids
from gateway.atropos.log.retries import Delivery, RetryDetector
from gateway.atropos.log.sequence import SequenceOrder
from gateway.atropos.scored_data import PostedGroup
from gateway.atropos.state.events import AnyEvent, encode_event
from gateway.atropos.state.queue import queued_group
from gateway.atropos.state.state import AtroposState
from pool.producers.output import Output
from pool.producers.producer import Producer
from pool.topics import ATROPOS, REWARDED
from schemas import AtroposEvent, Position, ScoredGroup
from servicekit.errors import BrokerUnavailable, Fatal, RecordTooLarge

log = logging.getLogger(__name__)

R = TypeVar("R")
SNAPSHOT_EVERY = 200
"""Events between snapshots. A restarted server reads at most twice as many."""


class LogWriter:
    def __init__(
        self,
        producer: Producer,
        run: str,
        owner: str,
        state: AtroposState,
        retries: RetryDetector,
        prompt_uids: PromptUids,
        channel: str,
    ) -> None:
        self._producer = producer
        self._run = run
        self._owner = owner
        self._state = state
        self._retries = retries
        self._prompt_uids = prompt_uids
        self._channel = channel
        self._order = SequenceOrder(state.applied)
        self._ends: dict[int, dict[int, int]] = {}
        """End offsets of `rewarded` when each pending change with groups began, the oldest first."""
        self._pending_events = 0
        self._events_since_snapshot = 0
        self._events_allowed = asyncio.Event()
        self._events_allowed.set()
        self._recorded = 0
        """Sequence up to which the log knows that answers were sent."""
        self._last_group = 0
        self._failed = asyncio.Event()

    @property
    def stalled_s(self) -> float:
        """Seconds for which the oldest pending record has waited for its acknowledgement."""
        return self._order.oldest_s

    @property
    def newest(self) -> int:
        """The sequence number that was assigned last."""
        return self._order.newest

    @property
    def has_recorded_all_answers(self) -> bool:
        """Whether the log knows about every answer that was sent."""
        return self._recorded >= self._retries.settled_up_to(self._last_group)

    async def append_posted(
        self, posted: Sequence[PostedGroup], deliveries: Sequence[Delivery]
    ) -> list[int | None]:
        """Appends posted groups, all of them or none; returns for each what `AtroposState.add_group`
        returns."""
        try:
            return await self._append_groups(
                [self._with_ids(group) for group in posted], deliveries
            )
        except RecordTooLarge:
            self._retries.discard(deliveries)
            raise

    def _with_ids(self, posted: PostedGroup) -> dict[str, Any]:
        return {
            "group_uid": os.urandom(16).hex(),
            "prompt_uid": self._prompt_uids.next_uid(),
            "fingerprint": posted.fingerprint,
            "channel": self._channel,
            **posted.content,
        }

    async def append_agent_group(self, fields: dict[str, Any]) -> None:
        """Appends a group of agents, for which no client waits."""
        await self._append_groups([fields], ())

    async def _append_groups(
        self, contents: Sequence[dict[str, Any]], deliveries: Sequence[Delivery]
    ) -> list[int | None]:
        first = self._order.begin(len(contents))
        self._ends[first] = dict(self._state.ends)
        try:
            if deliveries:
                self._last_group = self._order.newest
                self._retries.assign_sequences(deliveries, first)
            settled, now = self._settled(first), _now()
            records = [
                ScoredGroup(run=self._run, sequence=n, created_at=now, settled=settled, **fields)
                for n, fields in enumerate(contents, first)
            ]
            outputs = [self._producer.output(REWARDED, r.prompt_uid, r) for r in records]
            positions = await self._send(outputs)
            await self._order.wait_for_turn(first)
            return [
                self._state.add_group(queued_group(record, position))
                for record, position in zip(records, positions, strict=True)
            ]
        finally:
            del self._ends[first]
            self._order.end(first)

    async def wait_for_pending(self) -> None:
        """Returns when every change that has begun is applied."""
        turn = self._order.begin()
        try:
            await self._order.wait_for_turn(turn)
        finally:
            self._order.end(turn)

    async def append_event(self, event: AnyEvent, result: Callable[[], R]) -> R:
        """Appends an event and applies it; returns what `result` returns right after that, before any
        other change."""
        await self._events_allowed.wait()
        answer = await self._apply(event, result)
        self._events_since_snapshot += 1
        if self._events_since_snapshot >= SNAPSHOT_EVERY and not self._pending_events:
            await self.write_snapshot()
        return answer

    async def _apply(self, event: AnyEvent, result: Callable[[], R]) -> R:
        sequence = self._order.begin()
        self._pending_events += 1
        try:
            record = AtroposEvent(
                run=self._run,
                sequence=sequence,
                event=encode_event(event),
                settled=self._settled(sequence),
                created_at=_now(),
            )
            await self._send([self._producer.output(ATROPOS, self._run, record)])
            await self._order.wait_for_turn(sequence)
            self._state.apply(sequence, event)
            return result()
        finally:
            self._order.end(sequence)
            self._pending_events -= 1

    async def write_snapshot(self, stopped: bool = False) -> None:
        """Call it only while no event is pending. None begins before the log has the snapshot, so the
        events after it in the topic are exactly those that it lacks, however often it is sent."""
        self._events_since_snapshot = 0
        owner = "" if stopped else self._owner
        snapshot = self._state.snapshot()
        floors = self._floors(snapshot.floors)
        snapshot = msgspec.structs.replace(snapshot, owner=owner, floors=floors)
        self._events_allowed.clear()
        try:
            await self._apply(snapshot, lambda: None)
        finally:
            self._events_allowed.set()

    def _floors(self, floors: dict[int, int]) -> dict[int, int]:
        """Lowest needed offset by partition, of the state and of pending groups: a group that waits for
        its turn may lie before everything in the state, if others had to be sent again."""
        oldest = next(iter(self._ends.values()), floors)
        return {partition: min(at, oldest.get(partition, 0)) for partition, at in floors.items()}

    async def wait_for_failure(self) -> None:
        """Never returns; raises when the producer has failed for good."""
        await self._failed.wait()
        raise Fatal("the Kafka producer failed; the reason is logged above")

    def _settled(self, sequence: int) -> int:
        self._recorded = self._retries.settled_up_to(sequence - 1)
        return self._recorded

    async def _send(self, outputs: Sequence[Output]) -> list[Position]:
        """Sends all of them at the same time; returns their positions."""
        try:
            if len(outputs) == 1:
                return [await self._deliver(outputs[0])]
            return await asyncio.gather(*map(self._deliver, outputs))
        except Fatal:
            self._failed.set()
            raise

    async def _deliver(self, output: Output) -> Position:
        while True:
            try:
                return await self._producer.deliver(output)
            except BrokerUnavailable as error:
                log.warning("Sending a record to %s again: %s", output.topic, error)


def _now() -> int:
    return time.time_ns() // 1_000_000
