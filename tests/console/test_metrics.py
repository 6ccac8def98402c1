"""What Prometheus sees of the monitor."""

import re

from prometheus_client import generate_latest

from console.metrics import ALL, SnapshotCollector
from tests.console.snapshots import group, partition, run, snapshot


def told(collector: SnapshotCollector) -> dict[str, float]:
    lines = generate_latest(collector.registry).decode().splitlines()
    samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in samples}


def seen() -> SnapshotCollector:
    collector = SnapshotCollector()
    partitions = partition(0, 6, 9, lag_seconds=2.0, rebuild=4), partition(1, None, 0)
    collector.snapshot = snapshot(group("g", "steps", *partitions, members=2), runs=(run("math"),))
    collector.taken_at = 1000.0
    return collector


def test_lag_has_the_name_and_labels_that_dashboards_expect() -> None:
    found = told(seen())
    assert found['kafka_consumergroup_lag{consumergroup="g",partition="0",topic="steps"}'] == 3
    assert found['kafka_topic_partition_current_offset{partition="0",topic="steps"}'] == 9
    assert found['kafka_consumergroup_members{consumergroup="g"}'] == 2
    assert found["kafka_brokers"] == 1
    assert found['kafka_topic_partitions{topic="steps"}'] == 2


def test_a_partition_without_a_commit_has_no_offset_that_is_made_up() -> None:
    names = [name for name in told(seen()) if 'partition="1"' in name]
    assert not any(re.search("current_offset.*consumergroup|rebuild", name) for name in names)
    assert 'kafka_consumergroup_lag{consumergroup="g",partition="1",topic="steps"}' in names


def test_work_is_told_by_run() -> None:
    found = told(seen())
    assert found['steplog_groups{run="math",state="running"}'] == 2
    assert found['steplog_oldest_group_versions{run="math"}'] == 2
    assert found['steplog_live_version{run="math"}'] == 3


def test_every_metric_has_samples_after_a_snapshot() -> None:
    names = {name.partition("{")[0] for name in told(seen())}
    assert names == {metric.name for metric in ALL}


def test_a_group_that_is_gone_leaves_nothing_behind() -> None:
    collector = seen()
    collector.snapshot = snapshot()
    assert not any("consumergroup=" in name for name in told(collector))


def test_before_the_first_snapshot_only_failures_are_exported() -> None:
    assert told(SnapshotCollector()) == {"monitor_failures_total": 0}
