"""The Prometheus metrics that all consumers of the log share.

A process has one registry, in which a name can exist only once: so these are defined here and not in
each service.
"""

from collections.abc import Mapping

from prometheus_client import Counter, Gauge

lag = Gauge(
    "kafka_consumergroup_lag",
    "Records that the consumer group has not processed yet",
    ["consumergroup", "topic", "partition"],
)
last_progress = Gauge(
    "consumer_last_progress_timestamp_seconds", "Unix time of the consumer's last commit"
)
dead_letters = Counter(
    "dead_letters", "Unusable records written to dead-letters", ["stage", "reason"]
)


def set_lag(group: str, topic: str, lags: Mapping[int, int]) -> None:
    """Replaces the lag of all partitions, since they move between members."""
    lag.clear()
    for partition, records in lags.items():
        lag.labels(group, topic, partition).set(records)
