"""`steplog monitor` as Prometheus meets it."""

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from console.metrics import SnapshotCollector
from console.monitor import make_app
from console.settings import MonitorSettings
from pool import topics
from pool.connection import Connection
from pool.topics import STEPS
from tests import processes
from tests.conftest import free_port
from tests.console.consumer_groups import commit
from tests.console.snapshots import snapshot
from tests.steplog.command import STEPLOG, reaching
from tests.trainer.agents import submit_groups

LIMIT_S = 60.0
POLL_S = 0.05


def ask(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=LIMIT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(POLL_S)


@contextmanager
def running_monitor(connection: Connection) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    port = free_port()
    command = [STEPLOG, "monitor", "--port", str(port), "--every-s", "0.2", *reaching(connection)]
    with processes.Popen(command) as process:
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.kill()


@pytest.mark.broker
def test_it_serves_lag_under_the_customary_names(connection: Connection) -> None:
    group = f"{connection.topic_prefix}group"
    topics.create(connection, partitions=1)
    submit_groups(connection, ["a"])
    commit(connection, group, STEPS, {0: (2, "")})
    topic = connection.topic_name(STEPS)
    lag = f'kafka_consumergroup_lag{{consumergroup="{group}",partition="0",topic="{topic}"}}'
    with running_monitor(connection) as (url, process):
        until(lambda: ask(f"{url}/ready")[0] == 200)
        assert f"{lag} 6.0" in ask(f"{url}/metrics")[1]
        commit(connection, group, STEPS, {0: (5, "")})
        until(lambda: f"{lag} 3.0" in ask(f"{url}/metrics")[1])
        process.terminate()
        assert process.wait(LIMIT_S) == 143


@pytest.mark.broker
def test_topics_may_be_made_after_it_has_started(connection: Connection) -> None:
    with running_monitor(connection) as (url, _):
        until(lambda: ask(f"{url}/health")[0] == 200)
        assert ask(f"{url}/ready")[0] == 503
        topics.create(connection, partitions=1)
        until(lambda: ask(f"{url}/ready")[0] == 200)


def readiness(collector: SnapshotCollector) -> int:
    from fastapi.testclient import TestClient

    return TestClient(make_app(collector, patience=30)).get("/ready").status_code


def test_it_is_ready_while_the_last_snapshot_is_recent() -> None:
    collector = SnapshotCollector()
    assert readiness(collector) == 503
    collector.snapshot, collector.taken_at = snapshot(), time.time()
    assert readiness(collector) == 200
    collector.taken_at -= 31
    assert readiness(collector) == 503


def test_listening_beyond_loopback_must_be_meant() -> None:
    with pytest.raises(ValueError, match="--insecure"):
        MonitorSettings(host="0.0.0.0")
    assert MonitorSettings(host="0.0.0.0", insecure=True).port == 8400
