"""What Prometheus sees of the trainer."""

import pytest
from prometheus_client import REGISTRY

import servicekit.metrics as consumer_metrics
from pool.core.marks import Age
from trainer import metrics


def test_the_metrics_of_a_step_have_gauges() -> None:
    metrics.set_step_values({"reward_mean": 0.25, "entropy": float("nan")})
    assert REGISTRY.get_sample_value("trainer_reward_mean") == 0.25


def test_a_metric_without_a_gauge_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for _ in range(2):
        metrics.set_step_values({"made_up": 1.0})
    assert [r.message for r in caplog.records] == [
        "value made_up has no Prometheus gauge; only trackers get it"
    ]


@pytest.mark.heavy
def test_every_metric_of_the_algorithm_has_a_gauge() -> None:
    pytest.importorskip("torch")
    from trainer.algorithm.alarms import RULES
    from trainer.algorithm.statistics import MEANS

    assert {*MEANS, *(rule.metric for rule in RULES)} <= metrics.STEP_VALUES.keys()


def test_ages_are_split_into_queue_and_flight() -> None:
    def total(part: str) -> float:
        return REGISTRY.get_sample_value("staleness_versions_sum", {"part": part}) or 0.0

    before = [total(part) for part in ("in_queue", "in_flight", "total")]
    metrics.observe_ages([Age(1, 2), Age(0, 4)])
    after = [total(part) for part in ("in_queue", "in_flight", "total")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 6, 7]


def test_lag_forgets_partitions_that_went_to_others() -> None:
    consumer_metrics.set_lag("group", "steps", {0: 5, 1: 7})
    consumer_metrics.set_lag("group", "steps", {1: 2})
    lags = [
        (s.labels["partition"], s.value) for f in consumer_metrics.lag.collect() for s in f.samples
    ]
    assert lags == [("1", 2)]
