"""Short ways to write snapshots down."""

from typing import Any

from console.snapshot import (
    ClusterSnapshot,
    GroupLag,
    PartitionLag,
    PartitionOffsets,
    RunBacklog,
    group_lag,
)

NOW = "2030-01-31T12:00:00Z"


def partition(number: int, committed: int | None, end: int, **fields: Any) -> PartitionLag:
    defaults = {
        "lag": end - (committed or 0),
        "lag_seconds": 0.0,
        "rebuild": committed,
    }
    return PartitionLag(partition=number, committed=committed, end=end, **{**defaults, **fields})


def group(name: str, topic: str, *partitions: PartitionLag, members: int = 1) -> GroupLag:
    return group_lag(name, topic, members, list(partitions))


def run(name: str = "run", **fields: Any) -> RunBacklog:
    defaults = {
        "version": 3,
        "incarnation": 1,
        "open_trajectories": 4,
        "groups_running": 2,
        "groups_waiting": 1,
        "oldest_versions": 2,
    }
    return RunBacklog(run=name, **{**defaults, **fields})


def snapshot(*groups: GroupLag, runs: tuple[RunBacklog, ...] = ()) -> ClusterSnapshot:
    bounds = [
        PartitionOffsets(topic=one.topic, partition=p.partition, oldest=0, end=p.end)
        for one in groups
        for p in one.partitions
    ]
    return ClusterSnapshot(
        at=NOW, bootstrap="k:9092", brokers=1, groups=list(groups), runs=list(runs), topics=bounds
    )
