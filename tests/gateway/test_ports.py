"""A gateway on several ports, for clients that do not take a URL."""

import socket
from pathlib import Path

import pytest

from pool.connection import Connection
from tests.conftest import free_port
from tests.gateway.client import HELLO, steps
from tests.gateway.running import running_gateway
from tests.gateway.stub_engine import StubEngine
from tests.steplog.command import reaching, steplog

pytestmark = pytest.mark.broker


@pytest.mark.slow
def test_every_port_leads_to_the_same_gateway(
    log: Connection, stub: StubEngine, tokenizer: Path, uid: str
) -> None:
    others = [free_port(), free_port()]
    listening = ("--also-ports", ",".join(map(str, others)))
    with running_gateway(log, [stub.url], tokenizer, *listening) as gateway:
        for port in (gateway.port, *others):
            url = f"http://127.0.0.1:{port}"
            assert gateway.get(f"{url}/health").status == 200
            body = {"messages": HELLO}
            assert gateway.post(f"{url}/{uid}/p/v1/chat/completions", body).status == 200
        assert [step.step_index for step in steps(gateway, uid)] == [0, 1, 2]


def test_a_port_that_is_taken_is_one_sentence(connection: Connection) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = refused(connection, f"{free_port()},{port}")
    assert told == f"Cannot listen on 127.0.0.1:{port}: Address already in use; " + (
        "choose another --also-ports"
    )


def test_a_port_stands_there_once(connection: Connection) -> None:
    assert "a port is listed twice" in refused(connection, "9004,9004")
    assert "a port is listed twice" in refused(connection, "8100")


def refused(connection: Connection, ports: str) -> str:
    options = ["--engines", "http://127.0.0.1:1", "--tokenizer", "none", "--also-ports", ports]
    told = steplog("gateway", *reaching(connection), *options)
    assert told.returncode in (1, 2)
    return told.stderr.removeprefix("steplog: ").strip()
