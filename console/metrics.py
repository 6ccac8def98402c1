"""Every metric of the monitor, by its name in Prometheus.

Kafka's metrics have the names and labels of kafka_exporter, so that public dashboards and alerts
work unchanged. All samples of a scrape come from one snapshot: a deleted group leaves no series
behind, and no scrape mixes old and new values.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from console.snapshot import ClusterSnapshot, RunBacklog


class MetricSpec(NamedTuple):
    name: str
    labels: tuple[str, ...]
    help: str
    kind: str = "gauge"


GROUP_LABELS = ("consumergroup", "topic", "partition")
TOPIC_LABELS = ("topic", "partition")
RUN_LABELS = ("run",)

BROKERS = MetricSpec("kafka_brokers", (), "Number of brokers in the cluster")
PARTITIONS = MetricSpec("kafka_topic_partitions", ("topic",), "Number of partitions of the topic")
END = MetricSpec(
    "kafka_topic_partition_current_offset",
    TOPIC_LABELS,
    "End offset: the offset of the next record",
)
OLDEST = MetricSpec(
    "kafka_topic_partition_oldest_offset", TOPIC_LABELS, "Offset of the oldest record that is kept"
)
MEMBERS = MetricSpec(
    "kafka_consumergroup_members", ("consumergroup",), "Number of members of the group"
)
COMMITTED = MetricSpec("kafka_consumergroup_current_offset", GROUP_LABELS, "Committed offset")
LAG = MetricSpec(
    "kafka_consumergroup_lag", GROUP_LABELS, "Records that the group has not processed"
)
LAG_SECONDS = MetricSpec(
    "kafka_consumergroup_lag_seconds",
    GROUP_LABELS,
    "Age of the first unprocessed record; 0 if there is none",
)
REBUILD = MetricSpec(
    "kafka_consumergroup_rebuild_offset",
    GROUP_LABELS,
    "Oldest offset that the group needs to rebuild its state",
)
VERSION = MetricSpec("steplog_live_version", RUN_LABELS, "Newest live version")
OPEN_TRAJECTORIES = MetricSpec(
    "steplog_open_trajectories", RUN_LABELS, "Trajectories without an End"
)
GROUPS = MetricSpec(
    "steplog_groups",
    ("run", "state"),
    "Undecided groups, by state: running, or waiting for a Decision",
)
AGE = MetricSpec(
    "steplog_oldest_group_versions",
    RUN_LABELS,
    "Versions since the oldest undecided trajectory started",
)
TAKEN_AT = MetricSpec(
    "monitor_last_look_timestamp_seconds", (), "Unix time of the last snapshot of the cluster"
)
FAILURES = MetricSpec(
    "monitor_failures_total",
    (),
    "Failed attempts to take a snapshot; all values are those of the last successful one",
    "counter",
)

ALL = (
    BROKERS, PARTITIONS, END, OLDEST, MEMBERS, COMMITTED, LAG, LAG_SECONDS, REBUILD,
    VERSION, OPEN_TRAJECTORIES, GROUPS, AGE, TAKEN_AT, FAILURES,
)  # fmt: skip

Sample = tuple[MetricSpec, tuple[str, ...], float]


class SnapshotCollector(Collector):
    """Exports the last snapshot to Prometheus."""

    def __init__(self) -> None:
        self.snapshot: ClusterSnapshot | None = None
        self.taken_at = 0.0
        """Unix timestamp."""
        self.failures = 0
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        families = {spec.name: _make_family(spec) for spec in ALL}
        for spec, labels, value in self._samples():
            families[spec.name].add_metric(labels, value)
        return families.values()

    def _samples(self) -> Iterator[Sample]:
        yield FAILURES, (), self.failures
        if self.snapshot is not None:
            yield TAKEN_AT, (), self.taken_at
            yield from samples(self.snapshot)


def _make_family(spec: MetricSpec) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    return kind(spec.name, spec.help, labels=spec.labels)


def samples(snapshot: ClusterSnapshot) -> Iterator[Sample]:
    yield BROKERS, (), snapshot.brokers
    yield from _topic_samples(snapshot)
    yield from _group_samples(snapshot)
    for run in snapshot.runs:
        yield from _run_samples(run)


def _topic_samples(snapshot: ClusterSnapshot) -> Iterator[Sample]:
    counts: dict[str, int] = {}
    for bounds in snapshot.topics:
        labels = bounds.topic, str(bounds.partition)
        yield END, labels, bounds.end
        yield OLDEST, labels, bounds.oldest
        counts[bounds.topic] = counts.get(bounds.topic, 0) + 1
    for topic, count in counts.items():
        yield PARTITIONS, (topic,), count


def _group_samples(snapshot: ClusterSnapshot) -> Iterator[Sample]:
    yield from ((MEMBERS, (name,), count) for name, count in _members(snapshot).items())
    for group in snapshot.groups:
        for partition in group.partitions:
            labels = group.group, group.topic, str(partition.partition)
            yield LAG, labels, partition.lag
            yield LAG_SECONDS, labels, partition.lag_seconds
            if partition.committed is not None:
                yield COMMITTED, labels, partition.committed
            if partition.rebuild is not None:
                yield REBUILD, labels, partition.rebuild


def _members(snapshot: ClusterSnapshot) -> dict[str, int]:
    """Members by group; a group that reads two topics is in the snapshot twice."""
    return {group.group: group.members for group in snapshot.groups}


def _run_samples(run: RunBacklog) -> Iterator[Sample]:
    yield OPEN_TRAJECTORIES, (run.run,), run.open_trajectories
    yield GROUPS, (run.run, "running"), run.groups_running
    yield GROUPS, (run.run, "waiting"), run.groups_waiting
    yield AGE, (run.run,), run.oldest_versions or 0
    if run.version is not None:
        yield VERSION, (run.run,), run.version
