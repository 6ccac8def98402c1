"""What one look at the cluster shows. These types are the JSON of `steplog lag` as well.

Lag is counted as every Kafka tool counts it: the end of the partition, less the committed offset. What
a group has never committed it has never processed, so all that the partition holds is its lag. Lag in
seconds is the age of the first record that was not processed, and 0 where there is none.
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
    """None where there is no commit of ours."""

    @property
    def is_quiet(self) -> bool:
        """All is read, and no open state needs a record."""
        return self.lag == 0 and self.rebuild in (None, self.committed)


class GroupLag(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer group has before it in one topic."""

    group: str
    topic: str
    members: int
    lag: int
    lag_seconds: float
    partitions: list[PartitionLag]


class PartitionBounds(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    partition: int
    oldest: int
    end: int


class RunWork(msgspec.Struct, frozen=True, kw_only=True):
    """A run in the language of the job."""

    run: str
    version: int | None
    """The newest that went live."""
    incarnation: int
    open_trajectories: int
    groups_running: int
    groups_waiting: int
    """They ended, and the trainer has not decided about them."""
    oldest_versions: int | None
    """How many versions ago the oldest undecided trajectory began; None if there is none."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    at: str
    bootstrap: str
    brokers: int
    groups: list[GroupLag]
    runs: list[RunWork]
    topics: list[PartitionBounds]


class Commit(msgspec.Struct, frozen=True):
    offset: int
    metadata: str | None

    def rebuild(self) -> int | None:
        try:
            return Bookmark.parse(self.metadata, self.offset).rebuild
        except Fatal:
            return None  # another program's group: its metadata is its own


def partition_lag(
    bounds: PartitionBounds, commit: Commit | None, written_at: float | None, now: float
) -> PartitionLag:
    """`written_at` is when the first record was written that the group has not processed."""
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
