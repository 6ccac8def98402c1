"""Every metric of the monitor, by its name in Prometheus.

Those of Kafka have the names and labels that kafka_exporter made customary, so that public dashboards
and alerts work as they are. All samples of a scrape belong to one look: a group that is gone leaves no
series behind, and no scrape falls between two values.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from console.look import Look, RunWork


class Described(NamedTuple):
    name: str
    labels: tuple[str, ...]
    what: str
    kind: str = "gauge"


OF_A_GROUP = ("consumergroup", "topic", "partition")
OF_A_TOPIC = ("topic", "partition")
RUN = ("run",)

BROKERS = Described("kafka_brokers", (), "Brokers of the cluster")
PARTITIONS = Described("kafka_topic_partitions", ("topic",), "Partitions of the topic")
END = Described("kafka_topic_partition_current_offset", OF_A_TOPIC, "The next record's offset")
OLDEST = Described("kafka_topic_partition_oldest_offset", OF_A_TOPIC, "The first that is kept")
MEMBERS = Described("kafka_consumergroup_members", ("consumergroup",), "Members of the group")
COMMITTED = Described("kafka_consumergroup_current_offset", OF_A_GROUP, "The committed offset")
LAG = Described("kafka_consumergroup_lag", OF_A_GROUP, "Records that the group has not processed")
LAG_SECONDS = Described(
    "kafka_consumergroup_lag_seconds", OF_A_GROUP, "Age of the first of them, 0 without any"
)
REBUILD = Described(
    "kafka_consumergroup_rebuild_offset", OF_A_GROUP, "Oldest record that the group's state needs"
)
VERSION = Described("steplog_live_version", RUN, "The newest version that went live")
OPEN_TRAJECTORIES = Described("steplog_open_trajectories", RUN, "Trajectories without an End")
GROUPS = Described(
    "steplog_groups", ("run", "state"), "Undecided groups: state running or waiting for a Decision"
)
AGE = Described(
    "steplog_oldest_group_versions", RUN, "Versions since the oldest undecided trajectory began"
)
LOOKED = Described(
    "monitor_last_look_timestamp_seconds", (), "When the monitor last saw the whole cluster"
)
FAILURES = Described(
    "monitor_failures_total",
    (),
    "Looks that failed; the values are of the last good one",
    "counter",
)

ALL = (
    BROKERS, PARTITIONS, END, OLDEST, MEMBERS, COMMITTED, LAG, LAG_SECONDS, REBUILD,
    VERSION, OPEN_TRAJECTORIES, GROUPS, AGE, LOOKED, FAILURES,
)  # fmt: skip

Sample = tuple[Described, tuple[str, ...], float]


class LookCollector(Collector):
    """Gives Prometheus the last look."""

    def __init__(self) -> None:
        self.look: Look | None = None
        self.looked_at = 0.0
        """Seconds since the epoch."""
        self.failures = 0
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        families = {about.name: _family(about) for about in ALL}
        for about, labels, value in self._samples():
            families[about.name].add_metric(labels, value)
        return families.values()

    def _samples(self) -> Iterator[Sample]:
        yield FAILURES, (), self.failures
        if self.look is not None:
            yield LOOKED, (), self.looked_at
            yield from samples(self.look)


def _family(about: Described) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if about.kind == "counter" else GaugeMetricFamily
    return kind(about.name, about.what, labels=about.labels)


def samples(look: Look) -> Iterator[Sample]:
    yield BROKERS, (), look.brokers
    yield from _of_topics(look)
    yield from _of_groups(look)
    for run in look.runs:
        yield from _of_run(run)


def _of_topics(look: Look) -> Iterator[Sample]:
    counts: dict[str, int] = {}
    for bounds in look.topics:
        labels = bounds.topic, str(bounds.partition)
        yield END, labels, bounds.end
        yield OLDEST, labels, bounds.oldest
        counts[bounds.topic] = counts.get(bounds.topic, 0) + 1
    for topic, count in counts.items():
        yield PARTITIONS, (topic,), count


def _of_groups(look: Look) -> Iterator[Sample]:
    yield from ((MEMBERS, (name,), count) for name, count in _members(look).items())
    for group in look.groups:
        for one in group.partitions:
            labels = group.group, group.topic, str(one.partition)
            yield LAG, labels, one.lag
            yield LAG_SECONDS, labels, one.lag_seconds
            if one.committed is not None:
                yield COMMITTED, labels, one.committed
            if one.rebuild is not None:
                yield REBUILD, labels, one.rebuild


def _members(look: Look) -> dict[str, int]:
    """By group: one that reads two topics is there twice."""
    return {group.group: group.members for group in look.groups}


def _of_run(run: RunWork) -> Iterator[Sample]:
    yield OPEN_TRAJECTORIES, (run.run,), run.open_trajectories
    yield GROUPS, (run.run, "running"), run.groups_running
    yield GROUPS, (run.run, "waiting"), run.groups_waiting
    yield AGE, (run.run,), run.oldest_versions or 0
    if run.version is not None:
        yield VERSION, (run.run,), run.version
