"""Short ways to write a look down."""

from typing import Any

from console.look import GroupLag, Look, PartitionBounds, PartitionLag, RunWork, group_lag

NOW = "2030-01-31T12:00:00Z"


def partition(number: int, committed: int | None, end: int, **fields: Any) -> PartitionLag:
    told = {
        "lag": end - (committed or 0),
        "lag_seconds": 0.0,
        "rebuild": committed,
    }
    return PartitionLag(partition=number, committed=committed, end=end, **{**told, **fields})


def group(name: str, topic: str, *partitions: PartitionLag, members: int = 1) -> GroupLag:
    return group_lag(name, topic, members, list(partitions))


def run(name: str = "run", **fields: Any) -> RunWork:
    told = {
        "version": 3,
        "incarnation": 1,
        "open_trajectories": 4,
        "groups_running": 2,
        "groups_waiting": 1,
        "oldest_versions": 2,
    }
    return RunWork(run=name, **{**told, **fields})


def look(*groups: GroupLag, runs: tuple[RunWork, ...] = ()) -> Look:
    bounds = [
        PartitionBounds(topic=one.topic, partition=p.partition, oldest=0, end=p.end)
        for one in groups
        for p in one.partitions
    ]
    return Look(
        at=NOW, bootstrap="k:9092", brokers=1, groups=list(groups), runs=list(runs), topics=bounds
    )
