"""Prometheus metrics of the trainer; `servicekit.metrics` has those that all consumers share.

A value of a step is a gauge: `trainer_` and the name that the value has in the ledger's Outcome and in
every tracker.
"""

import logging
from collections.abc import Iterable, Mapping

from prometheus_client import Counter, Gauge, Histogram

from pool.core.marks import Age

log = logging.getLogger(__name__)

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)

groups = Counter("groups", "Decided groups, by verdict", ["verdict"])
trajectories = Counter(
    "trajectories",
    "Decided trajectories of the run, by verdict, over all incarnations",
    ["verdict"],
)
open_groups = Gauge("assembly_open_groups", "Groups that wait for trajectories or rewards")
oldest_open_group = Gauge(
    "assembly_oldest_open_group_seconds", "Time since the first record of the oldest open group"
)
rebuild_offset = Gauge(
    "rebuild_offset", "Oldest offset that a rebuild of open groups needs", ["partition"]
)
ready_groups = Gauge("trainer_ready_groups", "Closed groups that are ready to be trained")
wanted_groups = Gauge("trainer_wanted_groups", "Groups in a batch (groups_per_batch)")

policy_version = Gauge("policy_version", "Newest version that went live")
incarnation = Gauge("trainer_incarnation", "Number of the trainer's incarnation in its run")
adopted_version = Gauge(
    "policy_adopted_version", "Version that an engine last confirmed", ["engine"]
)
engines = Gauge(
    "trainer_engines", "Engines at the last broadcast, by state: ok or failed", ["state"]
)

step_seconds = Histogram("train_step_seconds", "Duration of training one batch", buckets=SECONDS)
broadcast_seconds = Histogram(
    "weights_broadcast_seconds", "Duration of sending one version to all engines", buckets=SECONDS
)
phase_seconds = Counter("trainer_phase_seconds", "Time of the training loop, by phase", ["phase"])
tokens_trained = Counter("tokens_trained", "Trained tokens")
staleness = Histogram(
    "staleness_versions",
    "Age of trained trajectories in versions, by part: in_queue, in_flight or total",
    ["part"],
    buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 32),
)
alarms = Counter("alarms", "Alarms raised, by name", ["alarm"])
tracker_failures = Counter("trainer_tracker_failures", "Steps that a tracker missed", ["tracker"])

STEP_VALUES = {
    "reward_mean": "Mean reward of the trained trajectories",
    "reward_mean_all": "Mean reward of all decided trajectories, trained or not",
    "reward_std": "Standard deviation of the rewards of trained trajectories",
    "advantage_std": "Standard deviation of the advantages",
    "turn_advantage_std": "Standard deviation of advantages within a trajectory (turn-level credit)",
    "turns_mean": "Mean number of turns per trained trajectory (turn-level credit)",
    "loss": "Loss",
    "kl": "KL divergence from the reference model, if there is one",
    "entropy": "Mean entropy of the trained tokens' distributions",
    "grad_norm": "Norm of the gradient before clipping",
    "skipped_steps": "Optimizer steps skipped because their gradient was NaN or infinite",
    "learning_rate": "Learning rate",
    "tokens": "Trained tokens of the step",
    "tokens_age_0": "Trained tokens of the step with age 0",
    "row_tokens": "Tokens of the step, prompts included",
    "tokens_per_second": "Tokens per second of training, prompts included",
    "tree_tokens": "Tokens that the step computed: those that rows of a group share count once",
    "balance": "Share of the ranks' time that is not spent on waiting for the slowest, estimated",
    "rows": "Rows of the step",
    "packs": "Forward passes of the step on all ranks",
    "tokens_per_pack": "Most tokens in a forward pass; halved when memory ran out",
    "out_of_memory": "Passes of the step that ran out of memory and were repeated",
    "trajectories": "Trained trajectories of the step",
    "generated_mean": "Mean number of sampled tokens per trained trajectory",
    "age_mean": "Mean age of the trained tokens, in versions",
    "age_min": "Age of the youngest trained token, in versions",
    "age_max": "Age of the oldest trained token, in versions",
    "spans_mean": "Mean number of versions that sampled a trajectory",
    "ratio_mean": "Mean ratio of the trainer's probability to the engine's",
    "ratio_max": "Largest ratio of the trainer's probability to the engine's",
    "logprob_difference": "Mean absolute difference of the trainer's and the engine's log-probs",
    "logprob_difference_age_0": "Mean absolute difference of log-probs over tokens with age 0",
    "mismatch_kl": "Mean of exp(d) - d - 1 over the differences d of log-probs",
    "ess": "Effective sample size as a share of the tokens, from 0 to 1",
    "masked_fraction": "Share of tokens that the loss masked",
    "masked_high_fraction": "Share of tokens masked because their ratio was high",
    "masked_low_fraction": "Share of tokens masked because their ratio was low",
    "rejected_fraction": "Share of tokens whose trajectory the loss rejected",
    "rejected_trajectories_fraction": "Share of trajectories that the loss rejected",
    "geo_ratio_p1": "First percentile of the trajectories' geometric mean ratios",
    "geo_ratio_p50": "Median of the trajectories' geometric mean ratios",
    "geo_ratio_p99": "99th percentile of the trajectories' geometric mean ratios",
    "no_variance_fraction": "Share of usable groups with equal rewards",
    "truncated_fraction": "Share of trajectories that ended at a limit",
    "failed_fraction": "Share of trajectories that failed or were cancelled",
    "prefix_break_fraction": "Share of Steps whose prompt does not continue an earlier one",
    "orphan_fraction": "Share of Steps that are orphans",
    "groups_trained_twice": "Groups trained more than once; the ledger should make it impossible",
    "group_wait_seconds": "Mean time from the close of a group to its Decision",
    "idle_fraction": "Share of the step's time that was not training; the idle causes sum to it",
    "idle_waiting_fraction": "Share of the step's time spent waiting for groups",
    "idle_reading_fraction": "Share of the step's time spent waiting for the batch to be read",
    "idle_syncing_fraction": "Share of the step's time spent sending weights to engines",
    "idle_checkpointing_fraction": "Share of the step's time spent on checkpoints",
    "idle_other_fraction": "Share of the step's time spent on anything else, such as a recovery",
}
"""Values that a step may report. A value that is not listed reaches the trackers only."""

step_gauges = {name: Gauge(f"trainer_{name}", help_) for name, help_ in STEP_VALUES.items()}
for _gauge in step_gauges.values():
    _gauge.set(float("nan"))  # 0 could raise alerts about values that are not measured
_unknown: set[str] = set()


def set_step_values(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if name in step_gauges:
            step_gauges[name].set(value)
        elif name not in _unknown:
            _unknown.add(name)
            log.info("value %s has no Prometheus gauge; only trackers get it", name)


def observe_ages(ages: Iterable[Age]) -> None:
    for age in ages:
        for part, versions in zip(
            ("in_queue", "in_flight", "total"), (*age, age.total), strict=True
        ):
            staleness.labels(part).observe(versions)
