"""The batch of a Decision, rebuilt from the log.

A Decision names every record of its batch by partition and offset, so the same bytes come back in
the same order whenever it is asked for: after a crash, in another process, years later.
"""

from collections import defaultdict
from collections.abc import Iterable

from pool.connection import Connection
from pool.errors import OffsetLost
from pool.progress import Received
from pool.reader import Reader, open_topic
from pool.topics import REWARDED
from pool.trajectories import Trajectory, TrajectoryAssembler
from schemas import Codec, DecidedGroup, Decision, Member


async def batch(connection: Connection, codec: Codec, decision: Decision) -> list[list[Trajectory]]:
    """The trained members of the trained groups, in the order of the Decision."""
    groups = [group for group in decision.groups if group.verdict == "train"]
    async with open_topic(connection, REWARDED) as reader:
        records = await _read(reader, codec, groups)
    return [
        [_trajectory(group.partition, member, records) for member in trained(group)]
        for group in groups
    ]


def trained(group: DecidedGroup) -> list[Member]:
    return [member for member in group.members if member.verdict == "train"]


async def _read(
    reader: Reader, codec: Codec, groups: Iterable[DecidedGroup]
) -> dict[tuple[int, int], Received]:
    wanted: dict[int, set[int]] = defaultdict(set)
    for group in groups:
        for member in trained(group):
            wanted[group.partition].update(member.offsets)
    starts = {partition: min(offsets) for partition, offsets in wanted.items()}
    ends = {partition: max(offsets) + 1 for partition, offsets in wanted.items()}
    found: dict[tuple[int, int], Received] = {}
    async for message in reader.read(starts, ends):
        if message.offset in wanted[message.partition]:
            place = (message.partition, message.offset)
            found[place] = Received(codec.decode(message.value), *place)
    missing = [(p, o) for p, offsets in wanted.items() for o in offsets if (p, o) not in found]
    if missing:
        raise OffsetLost(f"{len(missing)} records of the batch are gone, first {min(missing)}")
    return found


def _trajectory(
    partition: int, member: Member, records: dict[tuple[int, int], Received]
) -> Trajectory:
    assembler = TrajectoryAssembler()
    items = [assembler.feed(records[partition, offset]) for offset in member.offsets]
    whole = items[-1]
    assert isinstance(whole, Trajectory), "the last record of a member is its End"
    return whole
