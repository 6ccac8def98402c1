"""Every metric of the Atropos server, by its name in Prometheus."""

from prometheus_client import Counter, Gauge, Histogram

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

requests = Counter("atropos_requests", "Requests, by route and status", ["route", "code"])
request_seconds = Histogram(
    "atropos_request_duration_seconds", "Time from request to end of response", ["route"],
    buckets=SECONDS,
)  # fmt: skip
groups = Counter("atropos_groups", "Groups accepted from environments and agents")
sequences = Counter("atropos_sequences", "Token sequences in accepted groups")
left_out = Counter(
    "atropos_left_out_groups",
    "Groups of agents not handed on: too few usable members, or too large",
)
refused = Counter("atropos_refused_groups", "Posted groups refused because the queue was full")
retries = Counter("atropos_retries", "Posted groups recognized as retries of one in the log")
batches = Counter("atropos_batches", "Batches delivered to trainers")
broken_off = Counter(
    "atropos_broken_off_batches", "Responses with a batch during which the client disconnected"
)
queue_groups = Gauge("atropos_queue_groups", "Groups in the queue")
buffered_groups = Gauge(
    "atropos_buffered_groups", "Groups in buffers, waiting for others to make up the group size"
)
environments = Gauge("atropos_environments", "Environments that are connected and not silent")
step = Gauge("atropos_step", "Current step, as environments see it")
