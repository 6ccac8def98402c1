"""Every metric of the Atropos server, by its name in Prometheus."""

from prometheus_client import Counter, Gauge, Histogram

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

requests = Counter("atropos_requests", "Answered requests, by route and status", ["route", "code"])
request_seconds = Histogram(
    "atropos_request_duration_seconds", "From the request's head to the answer's end", ["route"],
    buckets=SECONDS,
)  # fmt: skip
groups = Counter("atropos_groups", "Groups that were taken in")
sequences = Counter("atropos_sequences", "Sequences of tokens in them")
left_out = Counter(
    "atropos_left_out_groups", "Groups of agents with too few usable members, or too large"
)
refused = Counter("atropos_refused_groups", "Groups that were posted while the queue was full")
retries = Counter("atropos_retries", "Posts of a group that the log had already")
batches = Counter("atropos_batches", "Batches that were handed over")
broken_off = Counter("atropos_broken_off_batches", "Responses with a batch that broke off")
queue_groups = Gauge("atropos_queue_groups", "Groups that wait for a batch")
buffered_groups = Gauge("atropos_buffered_groups", "Groups that wait for others of their size")
environments = Gauge("atropos_environments", "Environments that count in weights and minimums")
step = Gauge("atropos_step", "The step that environments are told")
