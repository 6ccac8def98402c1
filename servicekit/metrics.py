"""The metrics that every consumer of the log has, by their names in Prometheus.

A process has one registry, and a name can be in it once: so they stand here, and not with a service.
"""

from collections.abc import Mapping

from prometheus_client import Counter, Gauge

lag = Gauge(
    "kafka_consumergroup_lag",
    "Records that the group has not processed",
    ["consumergroup", "topic", "partition"],
)
last_progress = Gauge(
    "consumer_last_progress_timestamp_seconds", "When the consumer last committed"
)
dead_letters = Counter("dead_letters", "Records put aside", ["stage", "reason"])


def set_lag(group: str, topic: str, behind: Mapping[int, int]) -> None:
    lag.clear()  # partitions move
    for partition, records in behind.items():
        lag.labels(group, topic, partition).set(records)
