"""The batch of a Decision, read back from the log.

A Decision names every record of its batch by partition and offset, so the same bytes come back in
the same order whenever it is read: after a crash, in another process, years later.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from pool.connection import Connection
from pool.core import scored_groups
from pool.core.groups import Group
from pool.core.progress import Received
from pool.core.trajectories import StrayRecord, Trajectory, TrajectoryAssembler
from pool.readers.reader import TopicReader, open_topic
from schemas import Codec, DecidedGroup, Decision, Member, ScoredGroup
from servicekit.errors import OffsetLost
from servicekit.tracing import traceparent_of


async def read_batch(connection: Connection, codec: Codec, decision: Decision) -> list[Group]:
    """The trained groups with their trained members, in the order of the Decision."""
    groups = [group for group in decision.groups if group.verdict == "train"]
    return await read_groups(connection, codec, decision.topic, groups)


async def read_groups(
    connection: Connection, codec: Codec, topic: str, groups: Sequence[DecidedGroup]
) -> list[Group]:
    """Some of a Decision's groups, with their trained members."""
    if not groups:
        return []
    async with open_topic(connection, topic) as reader:
        records = await _read(reader, codec, groups)
    return [_group(group, records) for group in groups]


async def find_lost_groups(
    connection: Connection, topic: str, groups: Sequence[DecidedGroup]
) -> list[DecidedGroup]:
    """The groups of which the log has deleted records."""
    if not groups:
        return []
    async with open_topic(connection, topic) as reader:
        bounds = await reader.bounds(reader.partitions)
    return [group for group in groups if _first_offset(group) < bounds[group.partition].low]


def _first_offset(group: DecidedGroup) -> int:
    return min(offset for member in trained_members(group) for offset in member.offsets)


def trained_members(group: DecidedGroup) -> list[Member]:
    return [member for member in group.members if member.verdict == "train"]


async def _read(
    reader: TopicReader, codec: Codec, groups: Iterable[DecidedGroup]
) -> dict[tuple[int, int], Received]:
    wanted: dict[int, set[int]] = defaultdict(set)
    for group in groups:
        for member in trained_members(group):
            wanted[group.partition].update(member.offsets)
    starts = {partition: min(offsets) for partition, offsets in wanted.items()}
    ends = {partition: max(offsets) + 1 for partition, offsets in wanted.items()}
    records: dict[tuple[int, int], Received] = {}
    async for message in reader.read(starts, ends):
        if message.offset in wanted[message.partition] and message.value is not None:
            position = (message.partition, message.offset)
            trace = traceparent_of(message.headers)
            records[position] = Received(codec.decode(message.value), *position, trace)
    missing = [(p, o) for p, offsets in wanted.items() for o in offsets if (p, o) not in records]
    if missing:
        partition, offset = min(missing)
        raise OffsetLost(
            f"{len(missing)} records of the batch are no longer in the log; the first is offset "
            f"{offset} of partition {partition}"
        )
    return records


def _group(decided: DecidedGroup, records: dict[tuple[int, int], Received]) -> Group:
    group = Group(decided.prompt_uid, decided.partition, size=len(decided.members))
    group.closed_at = decided.closed_at
    for member in trained_members(decided):
        first = records[decided.partition, member.offsets[0]]
        if isinstance(first.record, ScoredGroup):
            posted = {
                trajectory.uid: trajectory for trajectory in scored_groups.trajectories_of(first)
            }
            group.members[member.trajectory_uid] = posted[member.trajectory_uid]
            continue
        assembler = TrajectoryAssembler()
        for offset in member.offsets:
            item = assembler.feed(records[decided.partition, offset])
            if isinstance(item, Trajectory):
                group.members[item.uid] = item
            elif isinstance(item, StrayRecord):
                group.feedback.append(item.received)
    return group
