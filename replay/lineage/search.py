"""Finds the records of one trajectory in the log.

The registration names the prompt, and with it the partition, and the offset at which the Steps begin;
so does the ledger for decided trajectories. Without either, the whole of `steps` is searched. This is
fast, since a record is decoded only if its bytes contain the uid.

A posted group is one record under its own uid; its trajectories are called GROUP/NUMBER.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress

from pool.connection import Connection
from pool.core.progress import Received
from pool.core.scored_groups import posted_group_uid, trajectories_of
from pool.readers.reader import open_topic
from pool.readers.scan import OffsetRange, Scan, decode_message
from pool.topics import REWARDED, STEPS, TOPICS, TRAJECTORIES, find_topics, spec_of
from replay.lineage.outcomes import Mention
from schemas import Codec, Registration, ScoredGroup


@dataclass(slots=True)
class LoggedTrajectory:
    """The records that the log still has of a trajectory, or of a posted group."""

    uid: str
    registrations: list[Registration] = field(default_factory=list)
    steps: list[Received] = field(default_factory=list)
    """Its records in `steps`."""
    rewarded: dict[str, list[Received]] = field(default_factory=dict)
    """Its records in each topic of rewards."""

    def __bool__(self) -> bool:
        return bool(self.registrations or self.steps or any(self.rewarded.values()))

    def posted_uids(self) -> list[str]:
        """The trajectories of the posted group, if this is one."""
        return [
            trajectory.uid
            for copies in self.rewarded.values()
            for copy in copies
            if isinstance(copy.record, ScoredGroup)
            for trajectory in trajectories_of(copy)
        ]

    def of(self, uid: str) -> "LoggedTrajectory":
        """The trajectory `uid`, with its own records in place of the posted group's record."""
        rewarded = {
            topic: [record for copy in copies for record in _records_of(copy, uid)]
            for topic, copies in self.rewarded.items()
        }
        return LoggedTrajectory(uid, self.registrations, self.steps, rewarded)


def _records_of(copy: Received, uid: str) -> list[Received]:
    if not isinstance(copy.record, ScoredGroup):
        return [copy]
    return [
        record
        for trajectory in trajectories_of(copy)
        if trajectory.uid == uid
        for record in (
            *trajectory.steps,
            Received(trajectory.end, copy.partition, copy.offset),
        )
    ]


class TrajectorySearch:
    """Searches the topics for the records of one trajectory, or of one posted group."""

    def __init__(self, connection: Connection, codec: Codec, uid: str) -> None:
        self._connection = connection
        self._codec = codec
        self._uid = uid

    def find(self, prompt: str | None, mentions: Sequence[Mention]) -> LoggedTrajectory:
        """`mentions` are the Decisions that name the trajectory."""
        logged = LoggedTrajectory(self._uid)
        logged.registrations = [
            found.record
            for found in self._search(TRAJECTORIES, self._uid)
            if isinstance(found.record, Registration)
        ]
        first = 0
        if logged.registrations:
            prompt = logged.registrations[0].prompt_uid
            first = logged.registrations[0].begins.offset
        else:
            prompt = next((m.prompt_uid for m in mentions if m.prompt_uid), prompt)
        logged.steps = self._search(STEPS, prompt, first)
        if logged.steps:
            prompt = getattr(logged.steps[0].record, "prompt_uid", prompt)
        for topic in self._reward_topics():
            offsets = (offset for m in mentions if m.topic == topic for offset in m.offsets)
            logged.rewarded[topic] = self._search(topic, prompt, min(offsets, default=0))
        return logged

    def _reward_topics(self) -> list[str]:
        names = sorted(find_topics(self._connection))
        return [name for name in names if spec_of(name) is TOPICS[REWARDED]]

    def _search(self, topic: str, key: str | None, first: int = 0) -> list[Received]:
        """The trajectory's records in a topic, from offset `first`; in all partitions if the key is
        unknown."""
        ranges = asyncio.run(self._ranges(topic, key, first))
        uid_bytes, candidates = posted_group_uid(self._uid).encode(), []
        console = Console(stderr=True)
        with (
            Scan(self._connection, topic, ranges) as scan,
            Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
        ):
            task = progress.add_task(f"searching {scan.topic}", total=scan.total)
            for message in scan:
                if uid_bytes in (message.value() or b""):
                    candidates.append(decode_message(message, self._codec))
                progress.update(task, completed=scan.done)
        return [candidate for candidate in candidates if self._is_match(candidate)]

    def _is_match(self, candidate: Received) -> bool:
        record = candidate.record
        if isinstance(record, ScoredGroup):
            uids = (trajectory.uid for trajectory in trajectories_of(candidate))
            return record.group_uid == self._uid or self._uid in uids
        return getattr(record, "trajectory_uid", None) == self._uid

    async def _ranges(self, topic: str, key: str | None, first: int) -> Mapping[int, OffsetRange]:
        async with open_topic(self._connection, topic) as reader:
            partitions = list(reader.partitions) if key is None else [reader.partition_of(key)]
            bounds = await reader.bounds(partitions)
        return {number: OffsetRange(max(first, b.low), b.end) for number, b in bounds.items()}
