"""What Prometheus sees of the trainer, and that the documentation shows all of it."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

import gateway.metrics
import pool.metrics
import reward.metrics
from pool.marks import Age
from trainer import metrics

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


def collectors(module: ModuleType) -> Iterator[MetricWrapperBase]:
    for found in vars(module).values():
        for one in found.values() if isinstance(found, dict) else (found,):
            if isinstance(one, MetricWrapperBase):
                yield one


def row(collector: MetricWrapperBase) -> str:
    family = next(iter(collector.describe()))
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = ", ".join(collector._labelnames)
    return f"| `{name}` | {family.type} | {labels} | {family.documentation} |"


@pytest.mark.parametrize("module", [gateway.metrics, reward.metrics, pool.metrics, metrics])
def test_the_documentation_has_every_metric(module: ModuleType) -> None:
    # describe() is collect() for a metric, and one with labels is shared by those that it has.
    rows = dict.fromkeys(row(one) for one in collectors(module) if not one._labelvalues)
    missing = [line for line in rows if line not in OPERATIONS.read_text().splitlines()]
    assert not missing, "docs/operations.md lacks\n" + "\n".join(missing)


def test_the_metrics_of_a_step_have_gauges() -> None:
    metrics.show_step({"reward_mean": 0.25, "entropy": float("nan")})
    assert REGISTRY.get_sample_value("trainer_reward_mean") == 0.25


def test_a_metric_without_a_gauge_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for _ in range(2):
        metrics.show_step({"made_up": 1.0})
    assert [r.message for r in caplog.records] == ["metric made_up has no gauge; trackers have it"]


def test_every_metric_of_the_algorithm_has_a_gauge() -> None:
    pytest.importorskip("torch")
    from trainer.algorithm.alarms import RULES
    from trainer.algorithm.statistics import MEANS

    assert {*MEANS, *(rule.metric for rule in RULES)} <= metrics.OF_A_STEP.keys()


def test_ages_are_split_into_queue_and_flight() -> None:
    def total(part: str) -> float:
        return REGISTRY.get_sample_value("staleness_versions_sum", {"part": part}) or 0.0

    before = [total(part) for part in ("in_queue", "in_flight", "total")]
    metrics.show_ages([Age(1, 2), Age(0, 4)])
    after = [total(part) for part in ("in_queue", "in_flight", "total")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 6, 7]


def test_lag_forgets_partitions_that_went_to_others() -> None:
    pool.metrics.show_lag("group", "steps", {0: 5, 1: 7})
    pool.metrics.show_lag("group", "steps", {1: 2})
    lags = [(s.labels["partition"], s.value) for f in pool.metrics.lag.collect() for s in f.samples]
    assert lags == [("1", 2)]
