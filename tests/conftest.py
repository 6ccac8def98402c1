"""One real broker for the whole run (all workers), and a topic prefix of its own for every test."""

import itertools
import os
import random
import select
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from pool.connection import Connection
from servicekit.tokenizer import hide_torch
from steplog.kafka import local_kafka
from tests import brokers, heavy, processes, scheduling


def _own_ports() -> Iterator[int]:
    """None from which the kernel gives to clients: one of those would have it while a server that was
    killed is started again. Tests that run at once have each their share."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = list(range(15_000 + worker, 32_000, workers))
    random.SystemRandom().shuffle(ports)
    return itertools.cycle(ports)


# How long an example takes depends on what else runs, and on what it is the first to import.
hypothesis.settings.register_profile("steplog", deadline=None)
hypothesis.settings.load_profile("steplog")
_ports = _own_ports()
_RUN = pytest.StashKey[ExitStack]()


def free_port() -> int:
    """Not one that was given before: whoever asked for it may not listen yet, or again."""
    while True:
        port = next(_ports)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def kill(broker: local_kafka.Broker) -> None:
    kill_and_wait(broker.pid)


def kill_and_wait(pid: int) -> None:
    """The kernel takes a moment to tear a process down, a Java process above all; until then it may
    take a connection. It need not be a child of ours."""
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([process], [], [], 60)[0]
    os.close(process)


def pause_and_wait(pid: int) -> None:
    """The threads of a process stop one after the other; until then, one of them may still answer."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while any(not _is_stopped(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _is_stopped(thread: Path) -> bool:
    """The state follows the name, which is in brackets and may be anything."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    return True  # it has ended


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return heavy.is_deselected(collection_path, config.option.markexpr) or None


def pytest_itemcollected(item: pytest.Item) -> None:
    if heavy.is_heavy(item.path):
        item.add_marker("heavy")
    if scheduling.group_of(item.nodeid) == "vLLM":
        item.add_marker("engine")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return scheduling.GroupScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    if heavy.excludes_heavy(config.option.markexpr):
        hide_torch()
    if processes.RUN_FOLDER in os.environ:  # a worker
        return
    run = config.stash[_RUN] = ExitStack()
    run.enter_context(processes.shared_run_folder())
    run.callback(_stop_broker)
    brokers.set_java_options()
    # `timeout` ends a run as Ctrl-C does, and its broker with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _RUN in config.stash:
        config.stash[_RUN].close()


def _stop_broker() -> None:
    with processes.run_folder("kafka") as folder:
        brokers.stop(folder / "kafka")


@pytest.fixture(scope="session")
def kafka() -> local_kafka.Broker:
    """The broker of the whole run. Tests that pause or kill one have one of their own."""
    with processes.run_folder("kafka") as folder:
        directory = folder / "kafka"
        return local_kafka.status(directory) or brokers.start(directory, free_port())


@pytest.fixture
def connection(kafka: local_kafka.Broker) -> Connection:
    return Connection(bootstrap=kafka.bootstrap, topic_prefix=f"test-{uuid.uuid4().hex[:8]}.")
