"""A snapshot of the cluster: lag of every group, backlog of every run. Its types are the JSON of
`steplog lag` too.

Lag is computed as in every Kafka tool: the end of the partition minus the committed offset. A group
without a commit has processed nothing, so its lag is everything that the partition holds. Lag in
seconds is the age of the first unprocessed record, and 0 if there is none.
"""

import msgspec

from pool.core.bookmark import Bookmark
from servicekit.errors import Fatal


class PartitionLag(msgspec.Struct, frozen=True, kw_only=True):
    partition: int
    committed: int | None
    end: int
    lag: int
    lag_seconds: float
    rebuild: int | None
    """The rebuild offset; None if the group has no commit with a bookmark."""

    @property
    def is_quiet(self) -> bool:
        """Whether all records are processed and none is needed to rebuild open state."""
        return self.lag == 0 and self.rebuild in (None, self.committed)


class GroupLag(msgspec.Struct, frozen=True, kw_only=True):
    """The lag of a consumer group in one topic."""

    group: str
    topic: str
    members: int
    lag: int
    lag_seconds: float
    partitions: list[PartitionLag]


class PartitionOffsets(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    partition: int
    oldest: int
    end: int


class RunBacklog(msgspec.Struct, frozen=True, kw_only=True):
    """The backlog of a run in the user's terms."""

    run: str
    version: int | None
    """The newest live version."""
    incarnation: int
    open_trajectories: int
    groups_running: int
    groups_waiting: int
    """Complete groups about which the trainer has not decided yet."""
    oldest_versions: int | None
    """Versions since the oldest undecided trajectory started; None if there is none."""


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    at: str
    bootstrap: str
    brokers: int
    groups: list[GroupLag]
    runs: list[RunBacklog]
    topics: list[PartitionOffsets]


class CommittedOffset(msgspec.Struct, frozen=True):
    offset: int
    metadata: str | None

    def rebuild(self) -> int | None:
        try:
            return Bookmark.parse(self.metadata, self.offset).rebuild
        except Fatal:
            return None  # the metadata of another program's group


def partition_lag(
    bounds: PartitionOffsets, commit: CommittedOffset | None, written_at: float | None, now: float
) -> PartitionLag:
    """`written_at` is the time of the first record that the group has not processed."""
    start = bounds.oldest if commit is None else commit.offset
    return PartitionLag(
        partition=bounds.partition,
        committed=None if commit is None else commit.offset,
        end=bounds.end,
        lag=max(0, bounds.end - start),
        lag_seconds=0.0 if written_at is None else max(0.0, round(now - written_at, 3)),
        rebuild=None if commit is None else commit.rebuild(),
    )


def group_lag(group: str, topic: str, members: int, partitions: list[PartitionLag]) -> GroupLag:
    return GroupLag(
        group=group,
        topic=topic,
        members=members,
        lag=sum(partition.lag for partition in partitions),
        lag_seconds=max((partition.lag_seconds for partition in partitions), default=0.0),
        partitions=partitions,
    )
