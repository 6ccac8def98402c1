"""Rebuilds the state from the log when a server starts.

Each start of a server is an epoch, which begins with a claim in the topic `atropos`. The run's previous
server reads the claim and stops; what it still writes has sequence numbers of an older epoch and is
ignored. Then the newest snapshot is searched from the topic's end, and the events after it are read,
and the groups from the oldest one that is in no delivered batch. The first record that a server writes
after its claim is its own snapshot.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.atropos.state.events import (
    AnyEvent,
    Claimed,
    Snapshot,
    decode_event,
    encode_event,
    epoch_of,
    first_sequence,
)
from gateway.atropos.state.queue import QueuedGroup, queued_group
from gateway.atropos.state.state import AtroposState, sequences_in
from pool.producers.producer import Producer
from pool.readers.reader import TopicReader
from pool.topics import ATROPOS
from schemas import AtroposEvent, Codec, Position, SchemaError, ScoredGroup
from schemas.codec import CONFLUENT, single_object_header
from servicekit.errors import Fenced

log = logging.getLogger(__name__)

TAIL = 2_000
"""Events that are read from the topic's end at first; other runs write to it, too."""
GRACE_S = 2.0
"""Time for a server that may still serve the run to notice the claim."""


class LoggedEvent(NamedTuple):
    offset: int
    sequence: int
    settled: int
    event: AnyEvent


@dataclass
class RebuiltState:
    state: AtroposState
    epoch: int
    claim_offset: int
    """A claim after this offset means that another server has taken over."""
    unsettled: list[tuple[int, bytes]] = field(default_factory=list)
    """Groups whose answers may not have been sent: sequence and fingerprint."""


class StateRebuild:
    """`progress` describes how far it is, for /ready."""

    def __init__(
        self,
        events: TopicReader,
        rewarded: TopicReader,
        producer: Producer,
        codec: Codec,
        run: str,
    ) -> None:
        self._events = events
        self._rewarded = rewarded
        self._producer = producer
        self._codec = codec
        self._run = run
        self.progress = "the state is being rebuilt from the log"

    async def run(self, owner: str) -> RebuiltState:
        tail, end = await self._tail()
        last_epoch = max((epoch_of(one.sequence) for one in tail), default=0)
        claim = await self._claim(last_epoch + 1, owner)
        if _owner(tail) not in ("", owner):
            self.progress = "waiting for the run's previous server to stop"
            await asyncio.sleep(GRACE_S)
        tail += [one async for one in self._read(end, claim.offset)]
        state, groups, settled = await self._fold(tail)
        state.applied = first_sequence(last_epoch + 1)
        unsettled = [
            (g.sequence, g.record.fingerprint)
            for g in groups
            if g.sequence > settled and g.record.fingerprint is not None
        ]
        log.info(
            "epoch %d of run %s: %d groups are queued, %d answers may not have been sent",
            last_epoch + 1,
            self._run,
            len(state.queue),
            len(unsettled),
        )
        return RebuiltState(state, last_epoch + 1, claim.offset, unsettled)

    async def _claim(self, epoch: int, owner: str) -> Position:
        claim = encode_event(Claimed(owner=owner))
        record = AtroposEvent(run=self._run, sequence=first_sequence(epoch), event=claim)
        return await self._producer.send(ATROPOS, self._run, record)

    async def _tail(self) -> tuple[list[LoggedEvent], int]:
        """The run's newest snapshot and all events after it, and the offset up to which was read. A new
        run has no snapshot."""
        bounds = (await self._events.bounds([0]))[0]
        length = TAIL
        while True:
            start = max(bounds.low, bounds.end - length)
            found = [one async for one in self._read(start, bounds.end)]
            # A server that was taken over may have written another one since.
            at = [
                (epoch_of(one.sequence), n)
                for n, one in enumerate(found)
                if isinstance(one.event, Snapshot)
            ]
            if at or start == bounds.low:
                return (found[max(at)[1] :] if at else found), bounds.end
            length *= 8

    async def _read(self, start: int, end: int) -> AsyncIterator[LoggedEvent]:
        if start >= end:
            return
        async for message in self._events.read({0: start}, {0: end}):
            if happened := self.event_of(message.value, message.offset):
                yield happened

    def event_of(self, value: bytes | None, offset: int) -> LoggedEvent | None:
        """The event in a record of the topic, or None if it belongs to another run."""
        try:
            record = self._codec.decode(value)
        except SchemaError as error:
            log.warning("Skipped a record of %s that cannot be decoded: %s", ATROPOS, error)
            return None
        if not isinstance(record, AtroposEvent) or record.run != self._run:
            return None
        return LoggedEvent(offset, record.sequence, record.settled, decode_event(record.event))

    async def _fold(self, tail: list[LoggedEvent]) -> tuple[AtroposState, list[QueuedGroup], int]:
        """Returns the state, the groups that were read, and the sequence up to which answers were
        sent."""
        state = AtroposState()
        ends = await self._rewarded.ends(self._rewarded.partitions)
        snapshot = tail[0].event if tail else None
        if not isinstance(snapshot, Snapshot):
            state.ends = ends
            return state, [], 0
        epoch = epoch_of(tail[0].sequence)
        wanted = sequences_in(snapshot)
        starts = {p: max(snapshot.floors.get(p, 0), 0) for p in ends}
        groups = {
            group.sequence: group
            async for group in self._groups(starts, ends)
            if group.sequence in wanted
            or (group.sequence > snapshot.applied and epoch_of(group.sequence) == epoch)
        }
        if lost := len(wanted - groups.keys()):
            log.warning("%d queued groups are no longer in the log and are lost.", lost)
        state.restore(snapshot, groups)
        # Keyed by sequence, because a record that was sent again may be in the log twice.
        new: dict[int, QueuedGroup | LoggedEvent] = dict(groups)
        new |= {one.sequence: one for one in tail if epoch_of(one.sequence) == epoch}
        for sequence in sorted(s for s in new if s > snapshot.applied):
            one = new[sequence]
            if isinstance(one, QueuedGroup):
                state.add_group(one)
            else:
                state.apply(sequence, one.event)
        state.ends = ends
        settled = [one.settled for one in tail] + [g.record.settled for g in groups.values()]
        return state, list(groups.values()), max(settled, default=0)

    async def _groups(
        self, starts: dict[int, int], ends: dict[int, int]
    ) -> AsyncIterator[QueuedGroup]:
        bounds = await self._rewarded.bounds(list(starts))
        starts = {p: max(at, bounds[p].low) for p, at in starts.items()}
        behind = {p: at for p, at in starts.items() if at < ends[p]}
        if not behind:
            return
        total = sum(ends[p] - at for p, at in behind.items())
        ours = (single_object_header(ScoredGroup), CONFLUENT)
        count = 0
        async for message in self._rewarded.read(behind, {p: ends[p] for p in behind}):
            count += 1
            self.progress = f"read {count:,} of about {total:,} records of the log"
            if not message.value or not message.value.startswith(ours):
                continue
            try:
                record = self._codec.decode(message.value)
            except SchemaError:
                continue  # reward workers and trainers report undecodable records
            if isinstance(record, ScoredGroup) and record.run == self._run:
                yield queued_group(
                    record, Position(partition=message.partition, offset=message.offset)
                )

    async def watch_for_takeover(self, rebuilt: RebuiltState) -> None:
        """Never returns; raises Fenced when another server has taken over the run."""
        async for message in self._events.read({0: rebuilt.claim_offset + 1}):
            happened = self.event_of(message.value, message.offset)
            if happened is not None and epoch_of(happened.sequence) > rebuilt.epoch:
                raise Fenced(
                    f"another `steplog atropos` has taken over run {self._run}; "
                    "only one server may serve a run, so this one stops"
                )


def _owner(tail: list[LoggedEvent]) -> str:
    """The supervisor of the run's last server, or an empty string if that server has stopped."""
    owners = [one.event.owner for one in tail if isinstance(one.event, Claimed | Snapshot)]
    return owners[-1] if owners else ""
