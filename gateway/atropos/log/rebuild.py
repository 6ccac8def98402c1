"""The state as the log has it, when a server begins.

A life of the server begins with a claim. Who served the run before reads it and stops; what such a
server still writes has numbers of an older life, and does not count. Then the newest snapshot is
looked for from the topic's end, and read are: the events after it, and the groups from the oldest one
on that is in no batch that was handed over. The first thing that a life writes is its own snapshot.
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
    first_of,
    life_of,
)
from gateway.atropos.state.queue import Group, group_of
from gateway.atropos.state.state import State, needed
from pool.producers.producer import Producer
from pool.readers.reader import TopicReader
from pool.topics import ATROPOS
from schemas import AtroposEvent, Codec, Position, SchemaError, ScoredGroup
from schemas.codec import CONFLUENT, single_object_header
from servicekit.errors import Fenced

log = logging.getLogger(__name__)

TAIL = 2_000
"""Events that are read from the topic's end at first; other runs write there, too."""
GRACE = 2.0
"""Seconds for a server that may still serve the run to see that it is over."""


class Happened(NamedTuple):
    offset: int
    sequence: int
    settled: int
    event: AnyEvent


@dataclass
class Rebuilt:
    state: State
    life: int
    claim: int
    """Offset of our claim: who writes one after it has taken over from us."""
    unknown: list[tuple[int, bytes]] = field(default_factory=list)
    """Groups whose answers may not have been sent: sequence and fingerprint."""


class Rebuild:
    """`progress` says in words how far it is."""

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

    async def run(self, owner: str) -> Rebuilt:
        tail, end = await self._tail()
        last_life = max((life_of(one.sequence) for one in tail), default=0)
        claim = await self._claim(last_life + 1, owner)
        if _owner(tail) not in ("", owner):
            self.progress = "a server that may still run has a moment to stop"
            await asyncio.sleep(GRACE)
        tail += [one async for one in self._read(end, claim.offset)]
        state, groups, settled = await self._fold(tail)
        state.applied = first_of(last_life + 1)
        unknown = [
            (g.sequence, g.record.fingerprint)
            for g in groups
            if g.sequence > settled and g.record.fingerprint is not None
        ]
        log.info(
            "life %d of run %s: %d groups wait, %d answers may not have been sent",
            last_life + 1,
            self._run,
            len(state.queue),
            len(unknown),
        )
        return Rebuilt(state, last_life + 1, claim.offset, unknown)

    async def _claim(self, life: int, owner: str) -> Position:
        claimed = encode_event(Claimed(owner=owner))
        record = AtroposEvent(run=self._run, sequence=first_of(life), event=claimed)
        return await self._producer.send(ATROPOS, self._run, record)

    async def _tail(self) -> tuple[list[Happened], int]:
        """The run's newest snapshot and all that follows it up to an offset; no snapshot, if the run
        is new."""
        bounds = (await self._events.bounds([0]))[0]
        length = TAIL
        while True:
            start = max(bounds.low, bounds.end - length)
            found = [one async for one in self._read(start, bounds.end)]
            # A server that was taken over may have written another one since.
            at = [
                (life_of(one.sequence), n)
                for n, one in enumerate(found)
                if isinstance(one.event, Snapshot)
            ]
            if at or start == bounds.low:
                return (found[max(at)[1] :] if at else found), bounds.end
            length *= 8

    async def _read(self, start: int, end: int) -> AsyncIterator[Happened]:
        if start >= end:
            return
        async for message in self._events.read({0: start}, {0: end}):
            if happened := self.event_of(message.value, message.offset):
                yield happened

    def event_of(self, value: bytes | None, offset: int) -> Happened | None:
        """What a record of the topic says, if it is of our run."""
        try:
            record = self._codec.decode(value)
        except SchemaError as error:
            log.warning("a record of %s cannot be read: %s", ATROPOS, error)
            return None
        if not isinstance(record, AtroposEvent) or record.run != self._run:
            return None
        return Happened(offset, record.sequence, record.settled, decode_event(record.event))

    async def _fold(self, tail: list[Happened]) -> tuple[State, list[Group], int]:
        """The state, the groups that were read, and up to where answers were sent."""
        state = State()
        ends = await self._rewarded.ends(self._rewarded.partitions)
        snapshot = tail[0].event if tail else None
        if not isinstance(snapshot, Snapshot):
            state.ends = ends
            return state, [], 0
        life = life_of(tail[0].sequence)
        wanted = needed(snapshot)
        starts = {p: max(snapshot.floors.get(p, 0), 0) for p in ends}
        groups = {
            group.sequence: group
            async for group in self._groups(starts, ends)
            if group.sequence in wanted
            or (group.sequence > snapshot.applied and life_of(group.sequence) == life)
        }
        if lost := len(wanted - groups.keys()):
            log.warning("%d groups that waited are no longer in the log", lost)
        state.restore(snapshot, groups)
        # By sequence, since a record that was in doubt may have been written twice.
        new: dict[int, Group | Happened] = dict(groups)
        new |= {one.sequence: one for one in tail if life_of(one.sequence) == life}
        for sequence in sorted(s for s in new if s > snapshot.applied):
            one = new[sequence]
            if isinstance(one, Group):
                state.take_in(one)
            else:
                state.apply(sequence, one.event)
        state.ends = ends
        told = [one.settled for one in tail] + [g.record.settled for g in groups.values()]
        return state, list(groups.values()), max(told, default=0)

    async def _groups(self, starts: dict[int, int], ends: dict[int, int]) -> AsyncIterator[Group]:
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
            self.progress = f"{count:,} of about {total:,} records of the log are read"
            if not message.value or not message.value.startswith(ours):
                continue
            try:
                record = self._codec.decode(message.value)
            except SchemaError:
                continue  # the readers of the topic see to it
            if isinstance(record, ScoredGroup) and record.run == self._run:
                yield group_of(record, Position(partition=message.partition, offset=message.offset))

    async def watch(self, rebuilt: Rebuilt) -> None:
        """Never returns: raises when another server has taken the run over."""
        async for message in self._events.read({0: rebuilt.claim + 1}):
            happened = self.event_of(message.value, message.offset)
            if happened is not None and life_of(happened.sequence) > rebuilt.life:
                raise Fenced(
                    f"another `steplog atropos` has taken over run {self._run}; "
                    "one server serves a run, so this one stops"
                )


def _owner(tail: list[Happened]) -> str:
    """Who served the run last."""
    owners = [one.event.owner for one in tail if isinstance(one.event, Claimed | Snapshot)]
    return owners[-1] if owners else ""
