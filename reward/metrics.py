"""The metrics of the reward worker, with their names in Prometheus. `servicekit.metrics` has those of
every consumer."""

from prometheus_client import Counter, Gauge, Histogram, Summary

processed = Counter("reward_processed", "Trajectories written to rewarded, by outcome", ["outcome"])
values = Histogram(
    "reward_value",
    "Distribution of rewards, by function and channel",
    ["reward", "channel"],
    buckets=(-10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 2, 5, 10),
)
scores = Summary("reward_score", "Sum and count of rewards, for their mean", ["reward", "channel"])
seconds = Histogram(
    "reward_duration_seconds",
    "Duration of a call of a reward function",
    ["reward"],
    buckets=(0.0001, 0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300),
)
failures = Counter("reward_failures", "Trajectories on which a function failed", ["reward"])
retries = Counter("reward_retries", "Calls of a function that were retried", ["reward"])
in_hand = Gauge("reward_in_hand", "Trajectories being scored")
expired = Counter("reward_expired_trajectories", "Trajectories ended because their deadline passed")
