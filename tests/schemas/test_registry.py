"""Confluent's framing with a real registry, which may go away once it has answered."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer as ConfluentProducer
from confluent_kafka.schema_registry import (
    Schema,
    SchemaRegistryClient,
    topic_record_subject_name_strategy,
)
from confluent_kafka.schema_registry.error import SchemaRegistryError

from pool import topics
from pool.connection import Connection
from pool.producers.output import producer_options
from pool.topics import STEPS, TOPICS
from schemas import Codec, Record, SchemaError, Step, StepNote
from schemas.codec import CONFLUENT, SINGLE_OBJECT, current_schema
from schemas.records import RECORD_TYPES
from schemas.registry import RegistryUnavailable, SchemaRegistry
from steplog.kafka import local_kafka
from tests.conftest import free_port
from tests.schemas.registry_server import RegistryServer, registry_server
from tests.schemas.samples import FULL, MINIMAL
from tests.steplog.command import reaching, steplog

pytestmark = [pytest.mark.broker, pytest.mark.slow]

TOPIC = "registered"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    with registry_server(tmp_path_factory.mktemp("registry")) as server:
        register_all(server.url)
        yield server


def register_all(url: str) -> None:
    registry = SchemaRegistry(url)
    for record_type in RECORD_TYPES:
        registry.register(TOPIC, record_type)


def name(record: Record) -> str:
    return type(record).__name__


@pytest.fixture
def client(server: RegistryServer) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": server.url}) as client:
        yield client


def changed(record_type: type[Record], field: dict[str, Any]) -> Schema:
    """The schema of a release that adds a field."""
    schema = current_schema(record_type)
    fields = [*schema["fields"], field]
    text = json.dumps({"type": "record", "name": schema["name"], "fields": fields})
    return Schema(text.replace('"{}"', '"{ }"'), "AVRO")


@pytest.mark.parametrize("record", FULL + MINIMAL, ids=name)
def test_a_record_survives_the_round_trip(server: RegistryServer, record: Record) -> None:
    value = Codec(SchemaRegistry(server.url)).encode(record, TOPIC)
    assert value.startswith(CONFLUENT)
    assert Codec(SchemaRegistry(server.url)).decode(value) == record


def test_both_framings_are_read_with_a_registry(server: RegistryServer) -> None:
    value = Codec().encode(FULL[0])
    assert value.startswith(SINGLE_OBJECT)
    assert Codec(SchemaRegistry(server.url)).decode(value) == FULL[0]


def test_without_a_registry_the_other_framing_is_refused_in_words(server: RegistryServer) -> None:
    value = Codec(SchemaRegistry(server.url)).encode(FULL[0], TOPIC)
    with pytest.raises(SchemaError, match=r"schema id \d+ needs a registry, and none is config"):
        Codec().decode(value)


def test_other_software_reads_what_we_write(
    server: RegistryServer, client: SchemaRegistryClient
) -> None:
    avro = pytest.importorskip("confluent_kafka.schema_registry.avro")
    serialization = pytest.importorskip("confluent_kafka.serialization")
    context = serialization.SerializationContext(TOPIC, serialization.MessageField.VALUE)
    codec = Codec(SchemaRegistry(server.url))
    options = {"subject.name.strategy": topic_record_subject_name_strategy}
    read = avro.AvroDeserializer(client, conf=options)
    for record in FULL:
        found = read(codec.encode(record, TOPIC), context)
        assert list(found) == list(record.__struct_fields__)
    step = read(codec.encode(FULL[0], TOPIC), context)
    assert isinstance(FULL[0], Step)
    assert (step["step_id"], step["prompt_ids"]) == (FULL[0].step_id, FULL[0].prompt_ids)


def test_we_read_what_other_software_writes(
    server: RegistryServer, client: SchemaRegistryClient
) -> None:
    avro = pytest.importorskip("confluent_kafka.schema_registry.avro")
    serialization = pytest.importorskip("confluent_kafka.serialization")
    registered = client.get_latest_version(f"{TOPIC}-steplog.StepNote").schema
    options = {
        "auto.register.schemas": False,
        "subject.name.strategy": topic_record_subject_name_strategy,
    }
    write = avro.AvroSerializer(client, registered.schema_str, conf=options)
    context = serialization.SerializationContext(TOPIC, serialization.MessageField.VALUE)
    note = next(record for record in FULL if isinstance(record, StepNote))
    value = write(msgspec.to_builtins(note), context)
    assert Codec(SchemaRegistry(server.url)).decode(value) == note


def test_a_breaking_change_is_refused_and_a_harmless_one_is_not(
    server: RegistryServer, client: SchemaRegistryClient
) -> None:
    subject = f"{TOPIC}-steplog.StepNote"
    assert client.get_compatibility(subject) == "FULL_TRANSITIVE"
    with pytest.raises(SchemaRegistryError) as refused:
        client.register_schema(subject, changed(StepNote, {"name": "must", "type": "string"}))
    assert refused.value.http_status_code == 409
    harmless = changed(StepNote, {"name": "may", "type": "string", "default": ""})
    assert client.register_schema(subject, harmless) > 0


def test_what_a_later_release_wrote_is_read(
    server: RegistryServer, client: SchemaRegistryClient
) -> None:
    later = changed(Step, {"name": "later", "type": "string", "default": "no"})
    schema_id = client.register_schema("elsewhere-steplog.Step", later)
    value = Codec().encode(FULL[0])[10:] + b"\x04ab"
    framed = CONFLUENT + schema_id.to_bytes(4, "big") + value
    assert Codec(SchemaRegistry(server.url)).decode(framed) == FULL[0]


def test_an_unknown_id_is_a_schema_error(server: RegistryServer) -> None:
    codec = Codec(SchemaRegistry(server.url))
    with pytest.raises(SchemaError, match=r"has no schema with id 4242 "):
        codec.decode(CONFLUENT + (4242).to_bytes(4, "big") + b"x")


def test_a_schema_of_other_people_is_a_schema_error(
    server: RegistryServer, client: SchemaRegistryClient
) -> None:
    codec = Codec(SchemaRegistry(server.url))
    record = '{"type": "record", "name": "theirs.Order", "fields": []}'
    for number, (text, kind, problem) in enumerate(
        [
            ('"string"', "AVRO", "is not an Avro record"),
            (
                '{"$schema": "http://json-schema.org/draft-07/schema#"}',
                "JSON",
                "is not an Avro record",
            ),
            (record, "AVRO", "this version knows no record type theirs.Order"),
        ]
    ):
        schema_id = client.register_schema(f"theirs-{number}", Schema(text, kind))
        with pytest.raises(SchemaError, match=problem):
            codec.decode(CONFLUENT + schema_id.to_bytes(4, "big") + b"x")


def test_an_unregistered_topic_says_what_to_do(server: RegistryServer) -> None:
    with pytest.raises(
        SchemaError, match=r"schema of new-steplog.Step; .* `steplog topics create`"
    ):
        Codec(SchemaRegistry(server.url)).encode(FULL[0], "new")


def test_what_is_known_works_without_the_server_and_the_rest_says_so(tmp_path: Path) -> None:
    with registry_server(tmp_path) as server:
        register_all(server.url)
        writer, reader = (Codec(SchemaRegistry(server.url)) for _ in range(2))
        value = writer.encode(FULL[0], TOPIC)
        assert reader.decode(value) == FULL[0]
        server.stop()
        assert writer.encode(MINIMAL[0], TOPIC).startswith(value[:5])
        assert reader.decode(value) == FULL[0]
        assert writer.decode(value) == FULL[0]
        with pytest.raises(RegistryUnavailable) as gone:
            reader.encode(FULL[1], TOPIC)
        assert str(gone.value).startswith(f"no registry answers at {server.url}: ")
        assert "\n" not in str(gone.value)
        with pytest.raises(RegistryUnavailable):
            reader.decode(CONFLUENT + (4242).to_bytes(4, "big") + b"x")


def test_creating_topics_registers_every_schema_and_cat_reads_them(
    server: RegistryServer,
    client: SchemaRegistryClient,
    connection: Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    where = [*reaching(connection), "--registry-url", server.url]
    made = steplog("topics", "create", "--partitions", "1", *where)
    assert (made.returncode, made.stderr) == (0, "")
    registered = [
        (connection.topic_name(topic), record_type.__name__)
        for topic, about in TOPICS.items()
        for record_type in about.records
    ]
    lines = made.stdout.splitlines()
    assert all(f"registered {record} for {topic}" in lines for topic, record in registered)
    subjects = {f"{topic}-steplog.{record}" for topic, record in registered}
    assert subjects <= set(client.get_subjects())
    assert steplog("topics", "create", *where).returncode == 0

    write(connection.model_copy(update={"registry_url": server.url}), FULL[0], FULL[1])
    write(connection, FULL[2])
    seen = steplog("cat", STEPS, *where)
    assert (seen.returncode, seen.stderr) == (0, "")
    shown = [json.loads(line)["type"] for line in seen.stdout.splitlines()]
    assert shown == ["Step", "TrajectoryEnd", "Feedback"]
    blind = steplog("cat", STEPS, *reaching(connection))
    shown = [json.loads(line)["type"] for line in blind.stdout.splitlines()]
    assert shown == ["undecodable", "undecodable", "Feedback"]


def write(connection: Connection, *records: Record) -> None:
    topic = connection.topic_name(STEPS)
    codec = connection.codec()
    producer = ConfluentProducer(producer_options(connection))
    for record in records:
        producer.produce(topic, codec.encode(record, topic), "p")
    assert producer.flush(30) == 0


def test_a_command_says_in_one_sentence_that_the_registry_is_away(
    kafka: local_kafka.Broker,
    connection: Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    topics.create(connection, partitions=1)
    for url, told in (
        (f"http://127.0.0.1:{free_port()}", "no registry answers at {}: "),
        ("registry:8081", "{} is not a registry's address: "),
    ):
        done = steplog("topics", "create", "--registry-url", url, *reaching(connection))
        assert done.returncode == 1
        (sentence,) = done.stderr.splitlines()
        assert sentence.startswith(f"steplog: {told.format(url)}")
