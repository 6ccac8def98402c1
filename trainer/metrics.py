"""Prometheus metrics of the trainer; `servicekit.metrics` has those of every consumer.

A value that belongs to a step is a gauge with the name that it has in the ledger's Outcome and in
every tracker, behind `trainer_`.
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
    "Decided trajectories of the run, by verdict, earlier lives included",
    ["verdict"],
)
open_groups = Gauge("assembly_open_groups", "Groups that wait for trajectories or rewards")
oldest_open_group = Gauge(
    "assembly_oldest_open_group_seconds", "Since the first record of the oldest of them"
)
rebuild_offset = Gauge("rebuild_offset", "Oldest record that open state needs", ["partition"])
ready_groups = Gauge("trainer_ready_groups", "Closed groups that a Decision could take")
wanted_groups = Gauge("trainer_wanted_groups", "Groups that a Decision takes")

policy_version = Gauge("policy_version", "The newest version that went live")
incarnation = Gauge("trainer_incarnation", "Number of this life of the trainer in its run")
adopted_version = Gauge(
    "policy_adopted_version", "The version that an engine last confirmed", ["engine"]
)
engines = Gauge("trainer_engines", "Engines at the last broadcast, by how it went", ["state"])

step_seconds = Histogram("train_step_seconds", "Training of one batch", buckets=SECONDS)
broadcast_seconds = Histogram(
    "weights_broadcast_seconds", "One version to every engine", buckets=SECONDS
)
phase_seconds = Counter(
    "trainer_phase_seconds", "Where the time of the training loop went", ["phase"]
)
tokens_trained = Counter("tokens_trained", "Tokens that carried gradient")
staleness = Histogram(
    "staleness_versions",
    "Age of trained trajectories: part in_queue, in_flight or total",
    ["part"],
    buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 32),
)
alarms = Counter("alarms", "Alarms, by name", ["alarm"])
tracker_failures = Counter(
    "trainer_tracker_failures", "Steps that a tracker did not take", ["tracker"]
)

OF_A_STEP = {
    "reward_mean": "Mean reward of the trained trajectories",
    "reward_mean_all": "Mean reward, groups that were not trained included",
    "reward_std": "Standard deviation of the trained trajectories' rewards",
    "advantage_std": "Standard deviation of the advantages",
    "loss": "Loss",
    "kl": "Divergence from the reference model, where there is one",
    "entropy": "Mean entropy of the trained tokens' distributions",
    "grad_norm": "Norm of the gradient before clipping",
    "learning_rate": "Learning rate",
    "tokens": "Trained tokens of the step",
    "tokens_age_0": "Trained tokens of the step that the newest version sampled",
    "row_tokens": "Tokens of the step's rows, prompts included",
    "tokens_per_second": "Tokens of rows per second of training",
    "rows": "Rows of the step",
    "packs": "Forward passes of the step, over all ranks",
    "trajectories": "Trained trajectories of the step",
    "generated_mean": "Tokens that a trained trajectory was sampled with, on average",
    "age_mean": "Mean age of the trained tokens, in versions",
    "age_min": "Age of the youngest trained token, in versions",
    "age_max": "Age of the oldest trained token, in versions",
    "spans_mean": "Versions that sampled a trajectory, on average",
    "ratio_mean": "Mean ratio of the trainer's to the engine's probability",
    "ratio_max": "Highest of these ratios",
    "logprob_difference": "Mean absolute difference of the trainer's and the engine's log-probability",
    "logprob_difference_age_0": "The same over tokens that the newest version sampled",
    "mismatch_kl": "Mean of exp(d) - d - 1 over these differences",
    "ess": "Effective share of the sample, from 0 to 1",
    "masked_fraction": "Share of tokens that the loss masked",
    "masked_high_fraction": "Share of tokens masked because their ratio was high",
    "masked_low_fraction": "Share of tokens masked because their ratio was low",
    "rejected_fraction": "Share of tokens whose trajectory the loss rejected",
    "rejected_trajectories_fraction": "Share of trajectories that the loss rejected",
    "geo_ratio_p1": "First percentile of the trajectories' geometric mean ratios",
    "geo_ratio_p50": "Median of the trajectories' geometric mean ratios",
    "geo_ratio_p99": "99th percentile of the trajectories' geometric mean ratios",
    "no_variance_fraction": "Share of usable groups whose rewards are all equal",
    "truncated_fraction": "Share of trajectories that ended at a limit",
    "failed_fraction": "Share of trajectories that failed or were cancelled",
    "prefix_break_fraction": "Share of Steps whose prompt does not continue an earlier one",
    "orphan_fraction": "Share of Steps that nobody received",
    "groups_trained_twice": "Groups that were trained before; the ledger makes it impossible",
    "group_wait_seconds": "Mean time from a group's close to its Decision",
    "idle_fraction": "Share of the time in which the trainer waited for groups",
}
"""What a step may report. A name that is not here reaches the trackers only."""

of_a_step = {name: Gauge(f"trainer_{name}", what) for name, what in OF_A_STEP.items()}
for _gauge in of_a_step.values():
    _gauge.set(float("nan"))  # 0 would be a value, and raise alerts about what nobody measures
_unknown: set[str] = set()


def show_step(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if name in of_a_step:
            of_a_step[name].set(value)
        elif name not in _unknown:
            _unknown.add(name)
            log.info("metric %s has no gauge; trackers have it", name)


def show_ages(ages: Iterable[Age]) -> None:
    for age in ages:
        for part, versions in zip(
            ("in_queue", "in_flight", "total"), (*age, age.total), strict=True
        ):
            staleness.labels(part).observe(versions)
