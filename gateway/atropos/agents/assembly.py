"""Assembles the groups of agents that called the gateway, for a trainer that pulls batches.

Reads what reward workers wrote to `rewarded` and assembles groups as steplog's trainer does. A group
that closes with enough usable members is written as a ScoredGroup; from then on it is treated like
those that environments post.

Each group is handed on exactly once, whenever a server is killed:

* None is lost. Reading resumes at the oldest record of any group that was not written yet, so that
  group closes again.
* None comes twice. The ScoredGroup itself says at which offset of `steps` the group closed, so a state
  that contains the group also knows that it closed. Trajectories that began before that offset are
  late, which includes all members of the group when they are read again.

Groups beyond a bound wait in the log, not in memory.
"""

import asyncio
import logging
import time
from typing import Any

from aiokafka import ConsumerRecord

from gateway.atropos import metrics
from gateway.atropos.agents.scored_group import (
    judge_trainable_member,
    scored_group_fields,
)
from gateway.atropos.log.writer import LogWriter
from gateway.atropos.state.events import ClosedAgentGroup
from gateway.atropos.state.state import AtroposState
from pool.core.bookmark import Bookmark
from pool.core.group_assembler import GroupAssembler
from pool.core.groups import Group, GroupRules
from pool.core.progress import Progress, Received
from pool.readers.reader import TopicReader
from schemas import Codec, DecidedGroup, SchemaError, ScoredGroup
from schemas.codec import single_object_header
from servicekit.errors import BrokerUnavailable, OffsetLost, RecordTooLarge

log = logging.getLogger(__name__)

SCORED_GROUP_HEADER = single_object_header(ScoredGroup)
"""Records that begin with this are skipped without decoding: agents did not write them."""
POLL_S = 0.5
"""Pause between checks for new records."""
RETRY_AFTER_S = 1.0
ROUND = 10_000
"""Offsets of a partition that are read before the state's reading progress is updated."""
MAX_SPAN = 200_000
"""Offsets of a partition for which a group may stay open. A restarted server reads all of them again,
and every snapshot names the groups that closed within them."""
MAX_WAITING = 10_000
"""Reading pauses while this many sequences without an environment wait in the queue, or four batches
if that is more."""


class AgentGroups:
    def __init__(
        self,
        reader: TopicReader,
        codec: Codec,
        writer: LogWriter,
        state: AtroposState,
        run: str,
        rules: GroupRules,
    ) -> None:
        self._reader = reader
        self._codec = codec
        self._writer = writer
        self._state = state
        self._run = run
        self._rules = rules
        self._assemblers: dict[int, GroupAssembler] = {}
        self._progress: dict[int, Progress[Any]] = {}
        self._positions: dict[int, int] = {}

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                await self._start_reading()
                while True:
                    if (
                        self._state.queue.sequences[None] >= self._max_waiting
                        or not await self._read_round()
                    ):
                        await asyncio.sleep(POLL_S)
            except (BrokerUnavailable, OffsetLost) as error:
                log.warning("Cannot read the groups of agents; trying again: %s", error)
                await asyncio.sleep(RETRY_AFTER_S)

    @property
    def _max_waiting(self) -> int:
        return max(MAX_WAITING, 4 * self._state.batch_size)

    async def _start_reading(self) -> None:
        """Starts where the state says, or at the oldest record if the log has deleted it since."""
        for partition, bounds in (await self._reader.bounds(self._reader.partitions)).items():
            rebuild = max(self._state.reading.get(partition, 0), bounds.low)
            assembler = GroupAssembler(
                self._rules,
                decided=self._closed_groups(partition),
                selects=lambda trajectory: trajectory.end.run == self._run,
            )
            progress = Progress[Any](partition, assembler, rebuild, Bookmark(rebuild))
            self._assemblers[partition] = assembler
            self._progress[partition] = progress
            self._positions[partition] = max(progress.read_from(), bounds.low)

    def _closed_groups(self, partition: int) -> list[tuple[DecidedGroup, int]]:
        groups = [
            (_as_decided(prompt_uid, closed), closed.offset)
            for prompt_uid, closed in self._state.closed.items()
            if closed.partition == partition
        ]
        return sorted(groups, key=lambda group: group[1])

    async def _read_round(self) -> bool:
        """Reads the next records; returns whether more are waiting."""
        ends = await self._reader.ends(self._reader.partitions)
        stops = {p: min(end, self._positions[p] + ROUND) for p, end in ends.items()}
        behind = {p: at for p, at in self._positions.items() if at < stops[p]}
        if behind:
            stops = {p: stops[p] for p in behind}
            async for message in self._reader.read(behind, stops):
                await self._process(message)
            self._positions |= stops
        for partition, position in self._positions.items():
            self._progress[partition].reach(position)
            for group in self._close_overdue(partition, position, ends[partition]):
                await self._settle(group, position)
            self._report_progress(partition, position)
        return any(position < ends[p] for p, position in self._positions.items())

    async def _process(self, message: ConsumerRecord) -> None:
        value = message.value
        if not value or value.startswith(SCORED_GROUP_HEADER):
            return
        try:
            record = self._codec.decode(value)
        except SchemaError:
            return  # reward workers and trainers report undecodable records
        if isinstance(record, ScoredGroup):
            return
        progress = self._progress[message.partition]
        works = progress.feed(Received(record, message.partition, message.offset))
        for work in works:
            if isinstance(work.item, Group):
                await self._settle(work.item, message.offset)
        progress.close(works)

    def _close_overdue(self, partition: int, position: int, end: int) -> list[Group]:
        """Closes groups that have been open for too long. Deadlines count only at the partition's end:
        before it, there may be members that were written in time."""
        assembler = self._assemblers[partition]
        groups, _ = assembler.give_up(position - MAX_SPAN, "expired", "it was open for too long")
        if position >= end:
            late = assembler.overdue(time.time_ns() // 1_000_000)
            for group in late:
                assembler.close(group)
            groups += late
        return groups

    async def _settle(self, group: Group, offset: int) -> None:
        assert group.closed_at is not None
        decided = group.judge(self._rules, judge_trainable_member)
        try:
            if decided.verdict == "train":
                fields = scored_group_fields(group, decided)
                await self._writer.append_agent_group(fields)
                metrics.groups.inc()
                metrics.sequences.inc(len(fields["tokens"]))
            else:
                _leave_out(group, decided.reason)
        except RecordTooLarge as error:
            _leave_out(group, str(error))
        self._state.mark_closed(
            group.prompt_uid, ClosedAgentGroup(group.partition, offset, group.closed_at)
        )
        self._assemblers[group.partition].decide(group, offset)

    def _report_progress(self, partition: int, position: int) -> None:
        progress = self._progress[partition]
        if progress.live:
            rebuild = progress.bookmark(position).rebuild
            self._state.set_reading_progress(partition, rebuild, progress.assembler.memory)


def _leave_out(group: Group, reason: str) -> None:
    metrics.left_out.inc()
    log.info("The group of prompt %s is not handed on: %s", group.prompt_uid, reason)


def _as_decided(prompt_uid: str, closed: ClosedAgentGroup) -> DecidedGroup:
    return DecidedGroup(
        prompt_uid=prompt_uid,
        partition=closed.partition,
        first_offset=0,
        closed_at=closed.closed_at,
        verdict="train",
    )
