"""Prepares the directory of a local broker: its settings, and formatted data.

A directory is accepted if it is empty, or if its `server.properties` starts with our mark; any other is
refused. `data` appears by one rename, so it is either completely formatted or missing. The directory is
Kafka's working directory, so settings need no paths, which Java might read in another encoding.
"""

import base64
import re
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

from pool.connection import MAX_MESSAGE_BYTES
from steplog.kafka.software import LocalKafkaError

HOST = "127.0.0.1"
PROPERTIES = "server.properties"
CAUSE = re.compile(r'(Caused by: |Exception in thread "\S+" )?[\w.$]+(Exception|Error): ')
MARK = "# Written by steplog at every start; changes are lost."


def prepare(directory: Path, port: int, controller_port: int, java: Sequence[str]) -> None:
    """Write the settings, and format the data directory if there is none. `java` is the command
    line that runs a class of Kafka's."""
    _refuse_other_files(directory)
    data = directory / "data"
    if data.exists():
        _check_data(data)
    else:
        new_data = directory / "data.new"
        shutil.rmtree(new_data, ignore_errors=True)
        _write_settings(directory, new_data.name, port, controller_port)
        _format(directory, java)
        new_data.rename(data)
    _write_settings(directory, data.name, port, controller_port)


def find_last_error(output: str) -> str:
    """The root cause of the last error in Kafka's output; without errors, the last line."""
    lines = output.strip().splitlines() or ["it printed nothing"]
    errors = [number for number, line in enumerate(lines) if " ERROR " in line]
    last_lines = lines[errors[-1] :] if errors else lines
    causes = [line for line in last_lines if CAUSE.match(line)]
    message = last_lines[0] if errors else last_lines[-1]
    return (causes or [message])[-1].strip()[:300]


def _refuse_other_files(directory: Path) -> None:
    settings = directory / PROPERTIES
    if settings.exists() and settings.read_text(errors="replace").startswith(MARK):
        return
    others = sorted(entry.name for entry in directory.iterdir())
    if others:
        raise LocalKafkaError(
            f"{directory} holds files that do not belong to a local broker, such as {others[0]}."
            " Choose an empty directory."
        )


def _check_data(data: Path) -> None:
    meta = data / "meta.properties"
    lines = meta.read_text(errors="replace").splitlines() if meta.is_file() else []
    if not {"version=1", "node.id=1"} <= set(lines):
        raise LocalKafkaError(
            f"{meta} is missing or damaged, so the broker cannot use its data. Move {data} away to"
            " start with an empty log."
        )


def _format(directory: Path, java: Sequence[str]) -> None:
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    tool = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "--config", PROPERTIES]
    done = subprocess.run([*java, *tool], cwd=directory, capture_output=True, text=True)
    if done.returncode:
        reason = find_last_error(done.stdout + done.stderr)
        raise LocalKafkaError(
            f"Kafka could not format {directory} ({reason}); see {directory}/broker.log."
        )


def _write_settings(directory: Path, data: str, port: int, controller_port: int) -> None:
    lines = [f"{name}={value}" for name, value in _settings(data, port, controller_port).items()]
    (directory / PROPERTIES).write_text("\n".join([MARK, *lines, ""]))


def _settings(data: str, port: int, controller_port: int) -> dict[str, str | int]:
    return {
        "process.roles": "broker,controller",
        "node.id": 1,
        "log.dirs": data,
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "controller.listener.names": "CONTROLLER",
        # A static quorum: the controller's port is not part of the data, so each start can choose one.
        "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        "auto.create.topics.enable": "false",
        "message.max.bytes": MAX_MESSAGE_BYTES,
        "replica.fetch.max.bytes": MAX_MESSAGE_BYTES,
        # One node: one replica of everything, and few internal partitions, which load quickly.
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "transaction.state.log.num.partitions": 4,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        "share.coordinator.state.topic.num.partitions": 4,
        # Short timeouts, so that killed brokers, members and transactions are replaced in seconds.
        "broker.session.timeout.ms": 3000,
        "broker.heartbeat.interval.ms": 1000,
        "group.initial.rebalance.delay.ms": 0,
        "group.min.session.timeout.ms": 3000,
        "group.consumer.min.session.timeout.ms": 3000,
        "group.consumer.session.timeout.ms": 6000,
        "group.consumer.min.heartbeat.interval.ms": 100,
        "group.consumer.heartbeat.interval.ms": 200,
        "group.consumer.assignment.interval.ms": 0,
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": 1000,
    }
