"""Atropos' own ServerManager with a bare config: it asks localhost, ports 9004 to 9007, whatever it is
told, and looks every second whether they live."""

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pool import topics
from pool.connection import Connection
from pool.topics import STEPS
from schemas import Step
from tests import processes
from tests.gateway.client import eventually
from tests.gateway.running import RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine
from tests.pool.log import records

pytest.importorskip("atroposlib")
pytestmark = [pytest.mark.broker, pytest.mark.slow]

PORTS = (9004, 9005, 9006, 9007)


@pytest.fixture
def gateway(connection: Connection, stub: StubEngine, tokenizer: Path) -> Iterator[RunningGateway]:
    for port in PORTS:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            pytest.skip(f"somebody has port {port}")
    topics.create(connection)
    options = ("--unbound-channel", "envs", "--also-ports", ",".join(map(str, PORTS)))
    with running_gateway(connection, [stub.url], tokenizer, *options) as running:
        yield running


def recorded(gateway: RunningGateway) -> list[Step]:
    return [one for one in records(gateway.connection, STEPS) if isinstance(one, Step)]


def ask(kind: str, tokenizer: Path, probes: Callable[[int], float]) -> int:
    """How many samples it got. It ends when each port was probed twice, as `probes` counts them."""
    script = Path(__file__).with_name("bare_config_env.py")
    environ = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), kind, str(tokenizer)]
    with tempfile.TemporaryFile("w+") as said:
        asking = processes.Popen(
            command, stdin=-1, stdout=-1, stderr=said, text=True, env=environ, preload="atropos"
        )
        with asking as process:
            assert process.stdout is not None
            samples = next((int(line) for line in process.stdout if line.strip().isdigit()), 0)
            eventually(lambda: process.poll() is not None or probes(samples) >= 2 * len(PORTS))
            process.communicate()
        said.seek(0)
        assert process.returncode == 0, said.read()[-3000:]
    return samples


def test_environments_of_a_bare_config_are_served_and_their_probes_are_not_recorded(
    gateway: RunningGateway, stub: StubEngine, tokenizer: Path
) -> None:
    before = len(stub.requests())
    samples = ask("openai", tokenizer, lambda samples: len(stub.requests()) - before - samples)
    steps = recorded(gateway)
    assert samples == len(steps) > 0
    assert {step.channel for step in steps} == {"envs"}

    def looked_at(_: int) -> float:
        return gateway.metric("http_requests_total", route="/health", code="200")

    more = ask("vllm", tokenizer, looked_at)
    assert len(recorded(gateway)) == samples + more > samples
