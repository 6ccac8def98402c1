"""Every metric of the gateway, by its name in Prometheus. No label takes a value that agents choose."""

from prometheus_client import Counter, Gauge, Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

http_requests = Counter(
    "http_requests", "Answered requests, by route and status", ["route", "code"]
)
http_request_seconds = Histogram(
    "http_request_duration_seconds", "From the request's head to the answer's end", ["route"],
    buckets=SECONDS,
)  # fmt: skip
inflight = Gauge("gateway_inflight_requests", "Requests that are being answered")
upstream_seconds = Histogram(
    "gateway_upstream_duration_seconds", "How long engines took for a call", buckets=SECONDS
)
first_token_seconds = Histogram(
    "gateway_time_to_first_token_seconds", "From a streamed request to its first text",
    buckets=SECONDS,
)  # fmt: skip
engine_failures = Counter(
    "gateway_engine_failures", "Calls that an engine failed; they are tried on another"
)
usable_engines = Gauge("gateway_usable_engines", "Engines that are well and have allowed weights")

open_trajectories = Gauge("gateway_open_trajectories", "Trajectories held in memory")
recovered_trajectories = Counter(
    "gateway_recovered_trajectories", "Trajectories rebuilt from the log"
)
admitted_groups = Gauge("gateway_admitted_groups", "Groups that run or wait for a decision")
refused_groups = Counter("gateway_refused_groups", "New groups that were told to wait")

steps_published = Counter("steps_published", "Steps in the log", ["channel"])
step_tokens = Histogram(
    "step_tokens", "Tokens per Step", ["part"], buckets=[2**n for n in range(4, 18)]
)
prompt_tokens, response_tokens = (step_tokens.labels(part) for part in ("prompt", "response"))
prompt_continuity = Counter(
    "gateway_prompts",
    "Prompts by how they relate to earlier Steps: first of their conversation, continued exactly, "
    "or rewritten by the client (a new prefix begins)",
    ["kind"],
)
not_trainable = Counter(
    "gateway_not_trainable_steps", "Steps whose sampling settings make their logprobs useless"
)
retries_served = Counter(
    "gateway_retries_served", "Marked retries, by how they were answered", ["how"]
)
undelivered = Counter("gateway_undelivered_steps", "Steps whose client was gone")
publish_ack_seconds = Histogram(
    "publish_ack_seconds", "From a record's send to its acknowledgement", buckets=SECONDS
)
publish_failures = Counter("publish_failures", "Records that the log did not take", ["reason"])
