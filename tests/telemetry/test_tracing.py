"""Traces that are off cost nothing; traces that are on hold nothing up."""

import logging
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from servicekit import tracing
from servicekit.errors import Fatal
from tests.conftest import free_port
from tests.gateway.client import eventually
from tests.telemetry.collector import Collector, running_collector
from tests.test_structure import MAY_IMPORT, ROOT, imported

MANY = 5_000
"""More than the SDK's queue takes."""


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    tracing.stop()


@pytest.fixture
def sending(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK sends at once."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


def test_one_module_knows_opentelemetry() -> None:
    files = [file for package in MAY_IMPORT for file in (ROOT / package).rglob("*.py")]
    assert [file.name for file in files if "opentelemetry" in imported(file)] == ["otel.py"]


@pytest.mark.parametrize("module", ["gateway.service", "reward.worker.service"])
def test_a_service_without_traces_does_not_load_the_package(module: str) -> None:
    script = f"""
import sys, {module}
from servicekit import tracing
tracing.start("x", False)
with tracing.span("work", version=1) as span:
    assert not tracing.headers(span.traceparent) and span is tracing.current()
print([name for name in sys.modules if name.partition(".")[0] == "opentelemetry"])
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert told.stdout.strip() == "[]", told.stderr


def test_without_the_package_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "servicekit.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(
        Fatal, match=r"Traces need the package .*: pip install 'steplog-rl\[otel\]'$"
    ):
        tracing.start("gateway", True)
    assert not tracing.is_enabled()


def test_a_parent_that_is_nonsense_begins_a_new_trace(
    collector: Collector, sending: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    tracing.start("gateway", True)
    with tracing.span("work", parent="00-nonsense-\0") as outer, tracing.span("part", version=None):
        assert tracing.current().traceparent.startswith(outer.traceparent[:35])
    eventually(lambda: collector.named("work") and collector.named("part"))
    work, part = collector.named("work")[0], collector.named("part")[0]
    assert not work.parent_id and part.parent_id == work.span_id
    assert work.service == "ours" and not part.about


def test_a_collector_that_is_away_costs_spans_and_one_line(
    sending: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    def arrives_at(collector: Collector) -> bool:
        """What a busy machine does not take within the second that it has is lost, too."""
        tracing.span("last").end()
        return bool(collector.named("last"))

    caplog.set_level(logging.INFO, "servicekit.otel")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # it gets little time
    port = free_port()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://me:geheim@127.0.0.1:{port}")
    tracing.start("gateway", True)
    before = time.thread_time()
    for _ in range(MANY):
        tracing.span("work").end()
    assert time.thread_time() - before < 5, "of our own thread: nothing was waited for"
    eventually(lines)
    for _ in range(MANY):
        tracing.span("work").end()
    with running_collector(port) as collector:
        eventually(lambda: arrives_at(collector))
        eventually(lambda: len(lines()) > 1)
    where = f"http://***@127.0.0.1:{port}/v1/traces"
    assert lines()[:2] == [
        f"Traces cannot be sent to {where}; they are lost until they can.",
        f"Traces are sent to {where} again.",
    ]


def test_an_ending_process_does_not_wait_for_a_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1000")
    script = """
import sys
from servicekit import tracing
tracing.start("gateway", True)
tracing.span("work").end()
"""
    before = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60)
    assert ended.returncode == 0
    assert time.monotonic() - before < 20, "the SDK tries again for half a minute"
