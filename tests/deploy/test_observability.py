"""Alerts and dashboards query metrics that exist, and Prometheus scrapes targets that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser
import pytest
from prometheus_client.metrics import MetricWrapperBase

import console.metrics
import gateway.metrics
import reward.metrics
import servicekit.metrics
import trainer.metrics
from steplog.settings import settings_class
from tests.deploy.compose_file import ROOT, SERVICES, names, read

PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
OF_PROMETHEUS = {"up"}
OF_VLLM = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:kv_cache_usage_perc",
}
"""Names as exported by vLLM 0.32."""
PARTS = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}
PORTS = {"gateway": "gateway", "reward": "reward", "trainer": "train", "monitor": "monitor"}
"""steplog's Prometheus jobs, and the service whose settings have the port."""


def exported(module: ModuleType) -> Iterator[tuple[str, set[str]]]:
    """The series that a module's metrics export, with their labels."""
    for found in vars(module).values():
        for one in found.values() if isinstance(found, dict) else (found,):
            if isinstance(one, MetricWrapperBase):
                family = next(iter(one.describe()))
                for part in PARTS[family.type]:
                    yield family.name + part, set(one._labelnames)


def exported_series() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    modules = (gateway.metrics, reward.metrics, trainer.metrics, servicekit.metrics)
    for name, labels in (pair for module in modules for pair in exported(module)):
        found[name] = found.get(name, set()) | labels
    for metric in console.metrics.ALL:
        found[metric.name] = found.get(metric.name, set()) | set(metric.labels)
    return found | {name: set() for name in OF_PROMETHEUS | OF_VLLM}


KNOWN = exported_series()


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    found: list[promql_parser.VectorSelector] = []

    def visit(part: promql_parser.Expr) -> bool:
        if isinstance(part, promql_parser.VectorSelector):
            found.append(part)
        elif isinstance(part, promql_parser.MatrixSelector):
            found.append(part.vector_selector)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def check(expression: str) -> None:
    """The expression parses, and uses only exported metrics and their labels."""
    found = selectors(expression)
    assert found, expression
    for one in found:
        assert one.name in KNOWN, f"no service exports {one.name}"
        labels = {matcher.name for matcher in one.matchers.matchers}
        assert labels <= KNOWN[one.name] | {"job", "instance"}, expression


def rules() -> list[dict[str, Any]]:
    groups = read(PROMETHEUS / "alerts.yml")["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_uses_exported_metrics(rule: dict[str, Any]) -> None:
    check(rule["expr"])
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["summary"]
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}


def test_alert_names_are_unique() -> None:
    alerts = [rule["alert"] for rule in rules()]
    assert len(alerts) == len(set(alerts))


def test_every_alert_has_a_row_in_its_runbook() -> None:
    """The row is below the heading to which the runbook annotation links."""
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        text = (ROOT / page).read_text()
        (section,) = re.findall(rf"^### {anchor}$(.*?)(?=^#|\Z)", text, re.M | re.S | re.I)
        rows = re.findall(rf"^\| `{rule['alert']}` \| (.+) \| (.+) \|$", section, re.MULTILINE)
        assert len(rows) == 1, rule["alert"]


def test_lag_is_taken_only_from_the_monitor() -> None:
    """Consumers export the same metric, so a sum over both would count records twice."""
    text = (PROMETHEUS / "alerts.yml").read_text()
    for file in DASHBOARDS:
        text += file.read_text().replace('\\"', '"')
    assert not re.findall(r'kafka_consumergroup_lag(?![\w{]|\{job="monitor")', text)


def test_the_labels_of_an_annotation_survive_its_expression() -> None:
    for rule in rules():
        text = " ".join(rule["annotations"].values())
        used = set(re.findall(r"\$labels\.(\w+)", text))
        for kept in re.findall(r"(?:sum|max) by \(([^)]*)\)", rule["expr"]):
            assert used <= set(kept.split(", ")), rule["alert"]


def targets(job: dict[str, Any]) -> list[tuple[str, int]]:
    found = [(name, one["port"]) for one in job.get("dns_sd_configs", []) for name in one["names"]]
    return found or [(job["job_name"], 9090)]


def test_every_target_is_a_service_on_its_port() -> None:
    config = read(PROMETHEUS / "prometheus.yml")
    assert config["rule_files"] == ["alerts.yml"]
    reachable = {name for service in SERVICES for name in names(service)}
    jobs = {job["job_name"]: targets(job) for job in config["scrape_configs"]}
    for job, places in jobs.items():
        for host, port in places:
            assert host in reachable, job
            if job in PORTS:
                assert port == settings_class(PORTS[job]).model_fields["port"].default
    assert jobs["vllm"] == [("vllm", 8000)]
    assert "--port=8000" in SERVICES["vllm-cpu"]["command"]
    assert jobs.keys() == {*PORTS, "vllm", "prometheus"}


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: str(file.stem))
def test_a_dashboard_uses_exported_metrics(file: Path) -> None:
    dashboard = json.loads(file.read_text())
    (source,) = read(GRAFANA / "provisioning" / "datasources" / "prometheus.yaml")["datasources"]
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) > 20
    for panel in panels:
        assert panel["datasource"]["uid"] == source["uid"]
        for target in panel["targets"]:
            check(target["expr"])
    assert dashboard["editable"] is False
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_panels_do_not_overlap() -> None:
    for file in DASHBOARDS:
        taken: set[tuple[int, int]] = set()
        for panel in json.loads(file.read_text())["panels"]:
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert at["x"] + at["w"] <= 24
            assert not cells & taken, panel["title"]
            taken |= cells


def test_grafana_finds_its_dashboards() -> None:
    (provider,) = read(GRAFANA / "provisioning" / "dashboards" / "steplog.yaml")["providers"]
    mounted = [volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounted
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (GRAFANA / "dashboards" / Path(home).name) in DASHBOARDS
    assert {json.loads(file.read_text())["uid"] for file in DASHBOARDS} == {
        "steplog-pipeline", "steplog-training",
    }  # fmt: skip
