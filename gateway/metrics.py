"""The gateway's Prometheus metrics. No label takes a value that agents choose."""

from prometheus_client import Counter, Gauge, Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

http_requests = Counter(
    "http_requests", "Requests that were responded to, by route and status", ["route", "code"]
)
http_request_seconds = Histogram(
    "http_request_duration_seconds", "Time from a request's headers to the end of its response",
    ["route"], buckets=SECONDS,
)  # fmt: skip
inflight = Gauge("gateway_inflight_requests", "Requests in progress")
upstream_seconds = Histogram(
    "gateway_upstream_duration_seconds", "Time that engines took for a call", buckets=SECONDS
)
first_token_seconds = Histogram(
    "gateway_time_to_first_token_seconds", "Time from a streamed request to its first token",
    buckets=SECONDS,
)  # fmt: skip
engine_failures = Counter(
    "gateway_engine_failures", "Calls that failed on an engine and were retried on another"
)
usable_engines = Gauge(
    "gateway_usable_engines", "Engines that are healthy and have allowed weights"
)

open_trajectories = Gauge("gateway_open_trajectories", "Trajectories in memory")
recovered_trajectories = Counter(
    "gateway_recovered_trajectories", "Trajectories read back from the log"
)
admitted_groups = Gauge(
    "gateway_admitted_groups", "Groups in flight: running or waiting for a decision"
)
refused_groups = Counter("gateway_refused_groups", "New groups that admission refused with 429")

steps_published = Counter("steps_published", "Steps acknowledged by Kafka", ["channel"])
step_tokens = Histogram(
    "step_tokens", "Tokens per Step", ["part"], buckets=[2**n for n in range(4, 18)]
)
prompt_tokens, response_tokens = (step_tokens.labels(part) for part in ("prompt", "response"))
prompt_continuity = Counter(
    "gateway_prompts",
    "Prompts by how they relate to earlier Steps: first of their conversation, exact continuation, "
    "or rewritten by the client (which begins a new prefix)",
    ["kind"],
)
not_trainable = Counter(
    "gateway_not_trainable_steps",
    "Steps whose logprobs cannot be trained on, because of sampling settings or missing logprobs",
)
omitted_attachments = Counter(
    "gateway_omitted_attachments",
    "Images and files in tool results that a short text replaced, in every request that has them",
)
retries_served = Counter(
    "gateway_retries_served", "Retries that needed no new call, by how they were served", ["how"]
)
overflows = Counter(
    "gateway_context_overflows",
    "Trajectories that outgrew the model's context; they count as truncated unless they go on",
)
undelivered = Counter("gateway_undelivered_steps", "Steps whose answer reached no client")
publish_ack_seconds = Histogram(
    "publish_ack_seconds", "Time from sending a record to its acknowledgement", buckets=SECONDS
)
publish_failures = Counter("publish_failures", "Records that Kafka did not acknowledge", ["reason"])
