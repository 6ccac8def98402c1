"""One real broker for the whole run, and a topic prefix of its own for every test."""

import os
import select
import signal
import socket
import uuid
from collections.abc import Iterator

import pytest

from pool.connection import Connection
from steplog import local_kafka


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def kill(broker: local_kafka.Broker) -> None:
    """Kill and wait for the end; the kernel takes a moment to tear a Java process down."""
    process = os.pidfd_open(broker.pid)
    os.kill(broker.pid, signal.SIGKILL)
    assert select.select([process], [], [], 10)[0]
    os.close(process)


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[local_kafka.Broker]:
    directory = tmp_path_factory.mktemp("kafka")
    yield local_kafka.start(directory, free_port())
    local_kafka.stop(directory)


@pytest.fixture
def connection(kafka: local_kafka.Broker) -> Connection:
    return Connection(bootstrap=kafka.bootstrap, topic_prefix=f"test-{uuid.uuid4().hex[:8]}.")
