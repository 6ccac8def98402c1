import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from pool.connection import MAX_MESSAGE_BYTES, Connection
from steplog.kafka import broker_directory, local_kafka, software
from steplog.kafka.local_kafka import Broker, LocalKafkaError
from tests.conftest import free_port, kill

TOPIC = "kept"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory whose name Java, shells and properties files could each read wrongly."""
    directory = tmp_path_factory.mktemp("own") / "a, b = ü\\n $HOME"
    yield directory
    local_kafka.stop(directory)


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture
def own(place: Path, port: int) -> Broker:
    """A broker that a test may stop and kill."""
    return local_kafka.start(place, port)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH, empty at first; and an empty cache."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def script(file: Path, body: str) -> None:
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def fails(directory: Path, port: int = 1, heap: str = "512m") -> str:
    with pytest.raises(LocalKafkaError) as caught:
        local_kafka.start(directory, port, heap)
    assert "\n" not in str(caught.value)
    assert local_kafka.status(directory) is None
    return str(caught.value)


def write(broker: Broker, *values: bytes) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    if TOPIC not in admin.list_topics(timeout=60).topics:
        admin.create_topics([NewTopic(TOPIC, 1, 1)])[TOPIC].result(60)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "acks": "all"})
    for value in values:
        producer.produce(TOPIC, value)
    assert producer.flush(60) == 0


def read(broker: Broker, count: int) -> list[bytes | None]:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "reader"})
    consumer.assign([TopicPartition(TOPIC, 0, OFFSET_BEGINNING)])
    records = consumer.consume(count, timeout=60)
    consumer.close()
    return [record.value() for record in records]


DYING = """
import ctypes, os, pathlib, socket, sys, threading, time

def has_ended(thread):
    stat = pathlib.Path(f"/proc/self/task/{thread}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "Z"

def linger():
    while not has_ended(os.getpid()):
        time.sleep(0.01)
    print(flush=True)
    time.sleep(2)

listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
threading.Thread(target=linger).start()
ctypes.CDLL(None).syscall(60, 0)  # ends the first thread only
"""


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the call has another number elsewhere")
def test_a_killed_broker_that_still_holds_its_port_is_waited_for(own: Broker, place: Path) -> None:
    told = json.loads((place / "broker.json").read_text())
    local_kafka.stop(place)
    command = [sys.executable, "-c", DYING, str(own.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as dying:
        assert dying.stdout is not None and dying.stdout.readline()
        (place / "broker.json").write_text(json.dumps(told | {"pid": dying.pid}))
        assert local_kafka.start(place, own.port).is_running()


@pytest.mark.slow
@pytest.mark.broker
def test_data_survive_stop_kill_and_a_change_of_port(own: Broker, place: Path, port: int) -> None:
    write(own, b"1")
    assert local_kafka.stop(place) == own
    assert local_kafka.status(place) is None
    moved = local_kafka.start(place, free_port())
    assert read(moved, 1) == [b"1"]
    write(moved, b"2")
    kill(moved)
    assert (place / "broker.json").exists()
    assert local_kafka.status(place) is None
    assert local_kafka.stop(place) is None
    again = local_kafka.start(place, port)
    assert again.pid != moved.pid
    assert read(again, 2) == [b"1", b"2"]


@pytest.mark.slow
@pytest.mark.broker
def test_stop_kills_a_broker_that_does_not_listen(
    own: Broker, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_kafka, "STOP_LIMIT_S", 0.3)
    os.kill(own.pid, signal.SIGSTOP)
    assert local_kafka.stop(place) == own
    assert not own.is_running()


@pytest.mark.broker
def test_starting_again_finds_the_running_broker(kafka: Broker) -> None:
    assert local_kafka.start(kafka.directory, kafka.port) == kafka


@pytest.mark.broker
def test_a_running_broker_does_not_move_to_another_port(kafka: Broker) -> None:
    with pytest.raises(LocalKafkaError, match=f"already running on port {kafka.port}, not 1."):
        local_kafka.start(kafka.directory, 1)
    assert local_kafka.status(kafka.directory) == kafka


@pytest.mark.broker
def test_the_broker_listens_on_loopback_only(kafka: Broker) -> None:
    listeners = next(
        line.split("=", 1)[1].split(",")
        for line in (kafka.directory / "server.properties").read_text().splitlines()
        if line.startswith("listeners=")
    )
    ports = [int(listener.rpartition(":")[2]) for listener in listeners]
    assert len(ports) == 2
    assert kafka.port in ports
    for number in ports:
        with socket.create_connection(("127.0.0.1", number)):
            pass
        # Another address of this machine, which a listener on all addresses would answer.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", number))


@pytest.mark.broker
def test_a_record_of_the_largest_size_is_taken_and_topics_are_not_made_up(
    connection: Connection,
) -> None:
    name = connection.topic_name("large")
    admin = AdminClient(connection.confluent())
    assert admin.list_topics(name, timeout=10).topics[name].error is not None
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(60)
    errors: list[object] = []
    producer = Producer(connection.confluent(message_max_bytes=MAX_MESSAGE_BYTES))
    producer.produce(
        name, os.urandom(MAX_MESSAGE_BYTES - 1024), callback=lambda error, _: errors.append(error)
    )
    assert producer.flush(60) == 0
    assert errors == [None]


@pytest.mark.slow
@pytest.mark.broker
def test_a_broker_that_dies_is_explained_by_its_log(tmp_path: Path) -> None:
    (tmp_path / "data" / "holiday photos").mkdir(parents=True)
    (tmp_path / "data" / "meta.properties").write_text("version=1\nnode.id=1\ncluster.id=x\n")
    (tmp_path / "server.properties").write_text(broker_directory.MARK)
    message = fails(tmp_path, free_port())
    assert f"The broker in {tmp_path} exited while it was starting (" in message
    assert "'holiday photos' is not in the form of topic-partition" in message
    assert message.endswith(f"; see {tmp_path}/broker.log.")


def test_a_pid_that_another_process_has_now_is_not_ours(tmp_path: Path) -> None:
    told = {"pid": os.getpid(), "port": 9092, "version": "4"}
    (tmp_path / "broker.json").write_text(json.dumps(told))
    assert local_kafka.status(tmp_path) is None
    assert local_kafka.stop(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": null}', '{"pid": 1}'])
def test_a_damaged_pid_file_means_that_nothing_runs(tmp_path: Path, content: str) -> None:
    (tmp_path / "broker.json").write_text(content)
    assert local_kafka.status(tmp_path) is None


def test_nothing_runs_in_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    assert local_kafka.status(tmp_path / "none") is None
    assert local_kafka.stop(tmp_path / "none") is None
    assert not (tmp_path / "none").exists()


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = fails(tmp_path, port)
    assert message == (
        f"Cannot listen on 127.0.0.1:{port}: Address already in use. Stop the process that uses this"
        " port, or choose another --port."
    )


def test_a_foreign_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert "do not belong to a local broker, such as thesis.txt" in fails(tmp_path, free_port())
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_settings_of_somebody_elses_broker_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "server.properties").write_text("node.id=7\n")
    assert "such as server.properties" in fails(tmp_path, free_port())
    assert (tmp_path / "server.properties").read_text() == "node.id=7\n"


@pytest.mark.parametrize("meta", [None, b"", b"\xff\x00garbage", b"version=1\nnode.id=2\n"])
def test_damaged_data_are_refused(tmp_path: Path, meta: bytes | None) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "server.properties").write_text(broker_directory.MARK)
    if meta is not None:
        (tmp_path / "data" / "meta.properties").write_bytes(meta)
    message = fails(tmp_path, free_port())
    assert f"{tmp_path}/data/meta.properties is missing or damaged" in message


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert f"Cannot run a broker in {tmp_path}/file" in fails(tmp_path / "file")
    assert "Not a directory. Choose" in fails(tmp_path / "file" / "below")


def test_a_heap_that_java_refuses_is_explained(tmp_path: Path) -> None:
    for _ in range(2):  # the second time, what the first left behind is not taken for foreign
        message = fails(tmp_path, free_port(), heap="1m")
        assert f"could not format {tmp_path} (Too small maximum heap)" in message


def test_java_is_missing(programs: Path, tmp_path: Path) -> None:
    assert fails(tmp_path / "kafka", free_port()) == (
        "Kafka needs Java, but there is none on the PATH. Install Java 17 or newer, or set"
        " JAVA_HOME to it."
    )


def test_java_home_is_wrong(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    assert "none in JAVA_HOME (/nowhere)" in fails(tmp_path / "kafka", free_port())


@pytest.mark.parametrize("version", ["1.8.0_392", "11.0.2"])
def test_java_is_too_old(programs: Path, tmp_path: Path, version: str) -> None:
    script(programs / "java", f"""echo 'openjdk version "{version}" 2020-01-01' >&2""")
    assert f"java is Java {version}, which is too old" in fails(tmp_path / "kafka", free_port())


def test_maven_is_missing(programs: Path, tmp_path: Path) -> None:
    script(programs / "java", """echo 'openjdk version "21" 2023-09-19' >&2""")
    assert "Maven (mvn) is needed once" in fails(tmp_path / "kafka", free_port())


def test_a_broken_download_is_not_cached(programs: Path, tmp_path: Path) -> None:
    jar = 'for last; do :; done; folder="${last#*=}"; /bin/mkdir "$folder"; echo > "$folder/k.jar"'
    script(programs / "mvn", f"{jar}; echo '[ERROR] no route'; echo '[ERROR] more'; exit 1")
    with pytest.raises(LocalKafkaError, match=r"could not download Kafka [\d.]+ \(no route\)\."):
        software.jars()
    assert list((tmp_path / "cache" / "steplog").iterdir()) == []
    script(programs / "mvn", jar)
    folder = software.jars()
    assert [file.name for file in folder.iterdir()] == ["k.jar"]
    (programs / "mvn").unlink()
    assert software.jars() == folder, "cached jars need no Maven"


def test_a_cache_that_cannot_be_written(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(LocalKafkaError, match=r"Cannot store Kafka's jars in .*Not a directory"):
        software.jars()
