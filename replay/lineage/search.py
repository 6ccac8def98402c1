"""Where the records of one trajectory lie.

Its registration tells the prompt, and with it the partition, and where its Steps begin; so does the
ledger, of what was decided. Where both are silent the whole of `steps` is searched: fast, since a
record is decoded only if the uid stands in its bytes.

A group that was posted is one record, under its own uid; its trajectories are called GROUP/NUMBER.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress

from pool.connection import Connection
from pool.core.progress import Received
from pool.core.scored_groups import posted_group_uid, trajectories_of
from pool.readers.reader import open_topic
from pool.readers.scan import OffsetRange, Scan, received
from pool.topics import REWARDED, STEPS, TOPICS, TRAJECTORIES, find_topics, spec_of
from replay.lineage.outcomes import Naming
from schemas import Codec, Registration, ScoredGroup


@dataclass(slots=True)
class Traces:
    """What the log still has of a trajectory."""

    uid: str
    registrations: list[Registration] = field(default_factory=list)
    steps: list[Received] = field(default_factory=list)
    rewarded: dict[str, list[Received]] = field(default_factory=dict)
    """By topic."""

    def __bool__(self) -> bool:
        return bool(self.registrations or self.steps or any(self.rewarded.values()))

    def posted(self) -> list[str]:
        """The trajectories of a posted group, if it is one that was found."""
        found = (one for records in self.rewarded.values() for one in records)
        return [
            t.uid
            for one in found
            if isinstance(one.record, ScoredGroup)
            for t in trajectories_of(one)
        ]

    def of(self, uid: str) -> "Traces":
        """With the trajectory's own part of a posted group in place of the group."""
        rewarded = {
            topic: [part for one in found for part in _parts(one, uid)]
            for topic, found in self.rewarded.items()
        }
        return Traces(uid, self.registrations, self.steps, rewarded)


def _parts(one: Received, uid: str) -> list[Received]:
    if not isinstance(one.record, ScoredGroup):
        return [one]
    own = [trajectory for trajectory in trajectories_of(one) if trajectory.uid == uid]
    return [part for t in own for part in (*t.steps, Received(t.end, one.partition, one.offset))]


class Finder:
    def __init__(self, connection: Connection, codec: Codec, uid: str) -> None:
        self._connection = connection
        self._codec = codec
        self._uid = uid

    def find(self, prompt: str | None, namings: Sequence[Naming]) -> Traces:
        """`namings`: where the ledger names it."""
        found = Traces(self._uid)
        found.registrations = [
            one.record
            for one in self._records(TRAJECTORIES, self._uid)
            if isinstance(one.record, Registration)
        ]
        began = 0
        if found.registrations:
            prompt = found.registrations[0].prompt_uid
            began = found.registrations[0].begins.offset
        else:
            prompt = next((naming.prompt_uid for naming in namings if naming.prompt_uid), prompt)
        found.steps = self._records(STEPS, prompt, began)
        if found.steps:
            prompt = getattr(found.steps[0].record, "prompt_uid", prompt)
        for topic in self._reward_topics():
            offsets = (n for naming in namings if naming.topic == topic for n in naming.offsets)
            first = min(offsets, default=0)
            found.rewarded[topic] = self._records(topic, prompt, first)
        return found

    def _reward_topics(self) -> Iterable[str]:
        names = sorted(find_topics(self._connection))
        return [name for name in names if spec_of(name) is TOPICS[REWARDED]]

    def _records(self, topic: str, key: str | None, first: int = 0) -> list[Received]:
        """Those of the trajectory. Without a key all partitions are searched."""
        spans = asyncio.run(self._spans(topic, key, first))
        sought, found = posted_group_uid(self._uid).encode(), []
        console = Console(stderr=True)
        with (
            Scan(self._connection, topic, spans) as scan,
            Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
        ):
            task = progress.add_task(f"searching {scan.topic}", total=scan.total)
            for message in scan:
                if sought in (message.value() or b""):
                    found.append(received(message, self._codec))
                progress.update(task, completed=scan.done)
        return [one for one in found if self._is_meant(one)]

    def _is_meant(self, one: Received) -> bool:
        if isinstance(one.record, ScoredGroup):
            names = (trajectory.uid for trajectory in trajectories_of(one))
            return one.record.group_uid == self._uid or self._uid in names
        return getattr(one.record, "trajectory_uid", None) == self._uid

    async def _spans(self, topic: str, key: str | None, first: int) -> Mapping[int, OffsetRange]:
        async with open_topic(self._connection, topic) as reader:
            partitions = list(reader.partitions) if key is None else [reader.partition_of(key)]
            bounds = await reader.bounds(partitions)
        return {number: OffsetRange(max(first, b.low), b.end) for number, b in bounds.items()}
