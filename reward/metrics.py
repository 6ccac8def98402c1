"""Every metric of the reward worker, by its name in Prometheus; `servicekit.metrics` has those of every
consumer."""

from prometheus_client import Counter, Gauge, Histogram, Summary

processed = Counter("reward_processed", "Trajectories written to rewarded", ["outcome"])
values = Histogram(
    "reward_value",
    "Rewards, by function and channel",
    ["reward", "channel"],
    buckets=(-10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 2, 5, 10),
)
scores = Summary("reward_score", "Rewards, for their mean", ["reward", "channel"])
seconds = Histogram(
    "reward_duration_seconds",
    "How long a function took",
    ["reward"],
    buckets=(0.0001, 0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300),
)
failures = Counter("reward_failures", "Trajectories that a function failed on", ["reward"])
retries = Counter("reward_retries", "Calls of a function that were tried again", ["reward"])
in_hand = Gauge("reward_in_hand", "Trajectories that are being scored")
expired = Counter("reward_expired_trajectories", "Trajectories ended because time was up")
