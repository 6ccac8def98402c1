"""Groups of agents that called our gateway, for a trainer that pulls batches.

What reward workers wrote to `rewarded` is assembled as a trainer of ours assembles it. A group that
closes and has enough usable members is written as a ScoredGroup, and from then on it is a group like
those that environments post.

Each comes exactly once, at whatever moment a server is killed:

* None is lost. Reading begins again at the oldest record that a group needed which was not written
  yet, so that group closes again.
* None comes twice. The record of a group says where in `steps` the group closed, so the state that has
  the group knows it, too: there is no moment between the two. Who began before that is late, and so are
  all members of the group when they are read again.

Groups beyond a bound wait in the log, not in memory.
"""

import asyncio
import logging
import time
from typing import Any

from aiokafka import ConsumerRecord

from gateway.atropos import metrics
from gateway.atropos.agents.scored_group import fields_of, trainable
from gateway.atropos.log.writer import Log
from gateway.atropos.state.events import Closed
from gateway.atropos.state.state import State
from pool.core.bookmark import Bookmark
from pool.core.groups import Group, GroupAssembler, GroupRules
from pool.core.progress import Progress, Received
from pool.readers.reader import TopicReader
from schemas import Codec, DecidedGroup, SchemaError, ScoredGroup
from schemas.codec import single_object_header
from servicekit.errors import BrokerUnavailable, OffsetLost, RecordTooLarge

log = logging.getLogger(__name__)

SCORED = single_object_header(ScoredGroup)
"""These are nothing that agents did, and large."""
POLL_S = 0.5
"""Between looks at the topic's end."""
RETRY_AFTER = 1.0
ROUND = 10_000
"""Offsets of a partition after which the state is told how far reading came."""
SPAN = 200_000
"""Offsets of a partition that a group may be open for: all of them are read again by the next server,
and a snapshot names the groups that closed meanwhile."""
AHEAD = 10_000
"""Sequences that wait in the queue while more are read; four batches, where these are larger."""


class Agents:
    def __init__(
        self,
        reader: TopicReader,
        codec: Codec,
        written: Log,
        state: State,
        run: str,
        rules: GroupRules,
    ) -> None:
        self._reader = reader
        self._codec = codec
        self._written = written
        self._state = state
        self._run = run
        self._rules = rules
        self._assemblers: dict[int, GroupAssembler] = {}
        self._progress: dict[int, Progress[Any]] = {}
        self._positions: dict[int, int] = {}

    async def assemble_for_ever(self) -> None:
        while True:
            try:
                await self._begin()
                while True:
                    if self._state.queue.sequences[None] >= self._ahead or not await self._go_on():
                        await asyncio.sleep(POLL_S)
            except (BrokerUnavailable, OffsetLost) as error:
                log.warning("reading what agents did is interrupted: %s", error)
                await asyncio.sleep(RETRY_AFTER)

    @property
    def _ahead(self) -> int:
        return max(AHEAD, 4 * self._state.batch_size)

    async def _begin(self) -> None:
        """Where the state says; what the log has deleted since is gone."""
        for partition, bounds in (await self._reader.bounds(self._reader.partitions)).items():
            rebuild = max(self._state.reading.get(partition, 0), bounds.low)
            assembler = GroupAssembler(
                self._rules,
                decided=self._closed(partition),
                selects=lambda trajectory: trajectory.end.run == self._run,
            )
            progress = Progress[Any](partition, assembler, rebuild, Bookmark(rebuild))
            self._assemblers[partition] = assembler
            self._progress[partition] = progress
            self._positions[partition] = max(progress.read_from(), bounds.low)

    def _closed(self, partition: int) -> list[tuple[DecidedGroup, int]]:
        found = [
            (_decided(prompt_uid, closed), closed.offset)
            for prompt_uid, closed in self._state.closed.items()
            if closed.partition == partition
        ]
        return sorted(found, key=lambda one: one[1])

    async def _go_on(self) -> bool:
        """Reads a round; whether there was more."""
        ends = await self._reader.ends(self._reader.partitions)
        stops = {p: min(end, self._positions[p] + ROUND) for p, end in ends.items()}
        behind = {p: at for p, at in self._positions.items() if at < stops[p]}
        if behind:
            stops = {p: stops[p] for p in behind}
            async for message in self._reader.read(behind, stops):
                await self._take(message)
            self._positions |= stops
        for partition, position in self._positions.items():
            self._progress[partition].reach(position)
            for group in self._overdue(partition, position, ends[partition]):
                await self._settle(group, position)
            self._tell(partition, position)
        return any(position < ends[p] for p, position in self._positions.items())

    async def _take(self, message: ConsumerRecord) -> None:
        value = message.value
        if not value or value.startswith(SCORED):
            return
        try:
            record = self._codec.decode(value)
        except SchemaError:
            return  # the readers of the topic see to it
        if isinstance(record, ScoredGroup):
            return
        progress = self._progress[message.partition]
        works = progress.feed(Received(record, message.partition, message.offset))
        for work in works:
            if isinstance(work.item, Group):
                await self._settle(work.item, message.offset)
        progress.close(works)

    def _overdue(self, partition: int, position: int, end: int) -> list[Group]:
        """Closes what has waited for too long. Deadlines count only where all is read: before, there
        may be members that were written in time."""
        assembler = self._assemblers[partition]
        groups, _ = assembler.give_up(position - SPAN, "expired", "it was open for too long")
        if position >= end:
            late = assembler.overdue(time.time_ns() // 1_000_000)
            for group in late:
                assembler.close(group)
            groups += late
        return groups

    async def _settle(self, group: Group, offset: int) -> None:
        assert group.closed_at is not None
        judged = group.judge(self._rules, trainable)
        try:
            if judged.verdict == "train":
                fields = fields_of(group, judged)
                await self._written.assemble(fields)
                metrics.groups.inc()
                metrics.sequences.inc(len(fields["tokens"]))
            else:
                _leave_out(group, judged.reason)
        except RecordTooLarge as error:
            _leave_out(group, str(error))
        self._state.close(group.prompt_uid, Closed(group.partition, offset, group.closed_at))
        self._assemblers[group.partition].decide(group, offset)

    def _tell(self, partition: int, position: int) -> None:
        progress = self._progress[partition]
        if progress.live:
            rebuild = progress.bookmark(position).rebuild
            self._state.read_up_to(partition, rebuild, progress.assembler.memory)


def _leave_out(group: Group, reason: str) -> None:
    metrics.left_out.inc()
    log.info("the group of prompt %s is left out: %s", group.prompt_uid, reason)


def _decided(prompt_uid: str, closed: Closed) -> DecidedGroup:
    return DecidedGroup(
        prompt_uid=prompt_uid,
        partition=closed.partition,
        first_offset=0,
        closed_at=closed.closed_at,
        verdict="train",
    )
