"""A real Kafka broker on this machine: one process, one directory, loopback only.

    DIRECTORY/
    ├── server.properties  the broker's settings, written at every start
    ├── data/              the log; it survives stops and kills
    ├── broker.json        the running process
    └── broker.log         the broker's log

The broker runs in its own session and outlives the command that started it. `broker.json` counts
only if the command line of its process names this directory: pids are reused, and a killed broker
leaves its file behind. Commands that change a directory lock it, so two simultaneous starts give
one broker.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from pydantic import BaseModel, ConfigDict, Field

from steplog.kafka import broker_directory, software
from steplog.kafka.broker_directory import HOST
from steplog.kafka.software import LocalKafkaError
from steplog.processes import is_zombie

__all__ = ["Broker", "LocalKafkaError", "LocalKafkaSettings", "start", "status", "stop"]

DEFAULT_PORT = 9092
DEFAULT_HEAP = "512m"
START_LIMIT_S = 60.0
STOP_LIMIT_S = 30.0
POLL_S = 0.05
EMPTY_READS = 500
"""A process has no command line for a moment while it executes another program or exits."""


class LocalKafkaSettings(BaseModel):
    """Where and how the local broker runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dir: Path = Field(
        Path(".steplog/kafka"), description="directory of the broker's data, settings and log"
    )
    port: int = Field(DEFAULT_PORT, ge=1, le=65535, description=f"port for clients, on {HOST}")
    heap: str = Field(
        DEFAULT_HEAP,
        pattern="^[1-9][0-9]*[mg]$",
        description="largest Java heap, such as 512m or 2g",
    )


@dataclass(frozen=True)
class Broker:
    """A broker that was started in a directory."""

    directory: Path
    pid: int
    port: int
    version: str

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def log(self) -> Path:
        return self.directory / "broker.log"

    def is_running(self) -> bool:
        return f" {_mark(self.directory)} " in _command_line(self.pid)


def start(directory: Path, port: int = DEFAULT_PORT, heap: str = DEFAULT_HEAP) -> Broker:
    """Start the broker of `directory` unless it is running already; return when it answers."""
    directory = directory.resolve()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory):
            running = status(directory)
            if not running:
                return _start(directory, port, heap)
    except OSError as error:
        raise LocalKafkaError(
            f"Cannot run a broker in {directory}: {error.strerror}. Choose a directory that you"
            " can write to."
        ) from error
    if running.port != port:
        raise LocalKafkaError(
            f"The broker in {directory} is already running on port {running.port}, not {port}. Stop"
            " it first, or use its port."
        )
    _wait_until_ready(running)
    return running


def stop(directory: Path) -> Broker | None:
    """Stop the broker of `directory` and return it; None if none was running."""
    directory = directory.resolve()
    if not directory.is_dir():
        return None
    try:
        with locked(directory):
            broker = status(directory)
            if broker:
                _end(broker)
    except OSError as error:
        raise LocalKafkaError(
            f"Cannot stop the broker in {directory}: {error.strerror}. Try as its owner."
        ) from error
    return broker


def status(directory: Path) -> Broker | None:
    """The running broker of `directory`, if there is one."""
    directory = directory.resolve()
    try:
        saved = json.loads((directory / "broker.json").read_text())
        broker = Broker(directory, int(saved["pid"]), int(saved["port"]), str(saved["version"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return broker if broker.is_running() else None


def answers(broker: Broker, limit: float) -> bool:
    """Whether it serves clients, which is more than a running process."""
    try:
        return bool(_admin(broker).list_topics(timeout=limit).brokers)
    except KafkaException:
        return False


def _admin(broker: Broker) -> AdminClient:
    options: dict[str, str | int | float | bool] = {
        "bootstrap.servers": broker.bootstrap,
        "reconnect.backoff.max.ms": 200,
        "log_level": 0,  # refused connections are expected here
    }
    with _blocked_interrupts():
        return AdminClient(options)


@contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Delay signals: an interrupt while the client is constructed becomes a TypeError about its
    settings."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on the directory."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _mark(directory: Path) -> str:
    return f"-Dsteplog.directory={directory}"


def _command_line(pid: int) -> str:
    """The command line of a process; empty if it is gone or a zombie."""
    if Path("/proc/self/cmdline").exists():
        with suppress(OSError):
            for _ in range(EMPTY_READS):
                line = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).replace("\0", " ")
                if line or is_zombie(pid):
                    return line
                time.sleep(0.01)
        return ""
    command = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True).stdout


def _start(directory: Path, port: int, heap: str) -> Broker:
    controller_port = _free_controller_port(port)
    java = ["/usr/bin/env", "LC_ALL=C.UTF-8"]  # in other locales, Java misreads some paths
    java += [software.java(), f"-Xmx{heap}", "-XX:+ExitOnOutOfMemoryError", _mark(directory)]
    java += software.java_options()
    java += ["-Dlog4j2.configurationFile=classpath:broker-log4j2.xml"]
    java += ["-cp", f"{software.jars()}/*:{Path(__file__).parent}"]
    broker_directory.prepare(directory, port, controller_port, java)
    log_before = _size(directory / "broker.log")
    pid = _spawn(directory, [*java, "kafka.Kafka", broker_directory.PROPERTIES])
    broker = Broker(directory, pid, port, software.version())
    try:
        _save(broker)
        _wait_until_ready(broker, log_before)
    except BaseException:
        _end(broker)
        raise
    return broker


def _free_controller_port(port: int) -> int:
    """A free port for the controller; the broker's own must be free too, and is held meanwhile."""
    with socket.socket() as broker, socket.socket() as controller:
        broker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            broker.bind((HOST, port))
        except OSError as error:
            raise LocalKafkaError(
                f"Cannot listen on {HOST}:{port}: {error.strerror}. Stop the process that uses this"
                " port, or choose another --port."
            ) from error
        controller.bind((HOST, 0))
        return int(controller.getsockname()[1])


def _spawn(directory: Path, command: Sequence[str]) -> int:
    """Start a command that outlives this process, and return its pid.

    The shell in between exits at once, so the broker is not our child and leaves no zombie in a
    long-lived caller. Until the shell's copy becomes Java, its command line contains the mark too.
    """
    script = '"$@" >>broker.log 2>&1 </dev/null & echo $!'
    shell = subprocess.run(
        ["/bin/sh", "-c", script, "sh", *command],
        cwd=directory,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        start_new_session=True,
    )
    return int(shell.stdout)


def _save(broker: Broker) -> None:
    document = {"pid": broker.pid, "port": broker.port, "version": broker.version}
    new_file = broker.directory / "broker.json.new"
    new_file.write_text(json.dumps(document) + "\n")
    new_file.replace(broker.directory / "broker.json")


def _wait_until_ready(broker: Broker, log_before: int = 0) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    admin = _admin(broker)
    while time.monotonic() < deadline:
        if not broker.is_running():
            output = broker.log.read_bytes()[log_before:].decode(errors="replace")
            raise LocalKafkaError(
                f"The broker in {broker.directory} exited while it was starting"
                f" ({broker_directory.find_last_error(output)}); see {broker.log}."
            )
        with suppress(KafkaException):
            if admin.list_topics(timeout=1).brokers:
                return
    raise LocalKafkaError(
        f"The broker on {broker.bootstrap} did not answer within {START_LIMIT_S:.0f} s;"
        f" see {broker.log}."
    )


def _end(broker: Broker) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if broker.is_running():
            with suppress(ProcessLookupError):
                os.kill(broker.pid, number)
        if _has_exited(broker):
            (broker.directory / "broker.json").unlink(missing_ok=True)
            return
    raise LocalKafkaError(
        f"The broker in {broker.directory} (pid {broker.pid}) does not exit, even after SIGKILL."
        " Find out what its process is waiting for."
    )


def _has_exited(broker: Broker) -> bool:
    deadline = time.monotonic() + STOP_LIMIT_S
    while broker.is_running():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
