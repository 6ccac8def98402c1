"""A cluster with TLS and logins: settings alone lead in, and what is wrong is one sentence."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pool import topics
from pool.connection import Connection
from pool.consumers.consumer import StatefulConsumer
from pool.consumers.transaction import CALL_TIMEOUT
from pool.core.trajectories import StrayRecord, Trajectory, TrajectoryAssembler
from pool.producers.output import Output
from pool.producers.producer import Producer
from pool.readers.reader import open_topic
from pool.topics import REWARDED, STEPS, TOPICS
from servicekit.errors import AccessRefused, BrokerUnavailable, Fatal, SteplogError
from tests.pool.certificates import Authority
from tests.pool.log import identity, records, until, write
from tests.pool.records import end, step
from tests.pool.secure_broker import PASSWORD, USER, SecureBroker, secure_broker
from tests.steplog.command import steplog

pytestmark = [pytest.mark.broker, pytest.mark.slow]

WRONG = "wr0ng-horse"
AT_ONCE = 30.0
"""Seconds within which a refusal is told, on a busy machine too; what only a timeout can tell takes
longer than that."""
WHILE = 5.0
"""Seconds within which a client has been refused at least once."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    with secure_broker(tmp_path_factory.mktemp("secure")) as running:
        yield running


def settings(broker: SecureBroker, **changes: Any) -> dict[str, Any]:
    """What leads in by SCRAM, with a topic prefix of its own; None takes a setting away."""
    usual = {
        "bootstrap": broker.sasl_ssl,
        "topic_prefix": f"test-{uuid.uuid4().hex[:8]}.",
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_username": USER,
        "sasl_password": PASSWORD,
        "ssl_ca": broker.authority.file,
    }
    return {name: value for name, value in (usual | changes).items() if value is not None}


NO_LOGIN = {"sasl_mechanism": None, "sasl_username": None, "sasl_password": None}
PLAINTEXT = {"security_protocol": "PLAINTEXT", "ssl_ca": None, **NO_LOGIN}


def mutual(broker: SecureBroker, **changes: Any) -> dict[str, Any]:
    usual = {"bootstrap": broker.ssl, "security_protocol": "SSL", **NO_LOGIN}
    return settings(broker, **(usual | changes))


def environment(given: dict[str, Any], folder: Path) -> dict[str, str]:
    """The settings as variables, the password in a file."""
    variables = {f"STEPLOG_{name.upper()}": str(value) for name, value in given.items()}
    password = variables.pop("STEPLOG_SASL_PASSWORD", None)
    if password is not None:
        (folder / "password").write_text(password + "\n")
        variables["STEPLOG_SASL_PASSWORD_FILE"] = str(folder / "password")
    return variables


def copy(connection: Connection, patience: float = 30) -> None:
    """Copies what `steps` holds to `rewarded`, in transactions."""
    codec = connection.codec()
    with StatefulConsumer[Trajectory | StrayRecord](
        connection,
        topic=STEPS,
        group=f"copy-{connection.topic_prefix}",
        transactional_id=f"{connection.topic_prefix}copy",
        assembler=lambda partition: TrajectoryAssembler(),
        codec=codec,
        patience=patience,
    ) as consumer:

        def turn() -> None:
            for work in consumer.poll():
                assert isinstance(work.item, Trajectory)
                values = [codec.encode(received.record) for received in work.item.records]
                name = connection.topic_name(REWARDED)
                consumer.finish([work], [Output(name, "key", value) for value in values])
            consumer.commit()

        until(lambda: len(records(connection, REWARDED)) >= 2, turn)


def send(connection: Connection, timeout: float = 30) -> None:
    async def run() -> None:
        async with Producer(connection, connection.codec(), timeout=timeout) as producer:
            await producer.send(STEPS, "key", step("s0"))

    asyncio.run(run())


def read(connection: Connection) -> None:
    async def run() -> None:
        async with open_topic(connection, STEPS):
            pass

    asyncio.run(run())


def hides_passwords(*shown: str) -> None:
    assert not [text for text in shown if PASSWORD in text or WRONG in text]


def test_commands_work_by_variables_and_a_password_file(
    broker: SecureBroker, tmp_path: Path
) -> None:
    given = settings(broker)
    variables = environment(given, tmp_path)
    made = steplog("topics", "create", "--partitions", "1", **variables)
    assert (made.returncode, made.stderr) == (0, "")
    created = [f"created {given['topic_prefix']}{name}" for name in TOPICS]
    fits = f"All topics exist and match at {broker.sasl_ssl}."
    assert made.stdout.splitlines() == [*created, fits]
    checked = steplog("topics", "check", **variables)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, f"{fits}\n", "")
    write(Connection(**given), STEPS, [step("s0")])
    shown = steplog("cat", STEPS, **variables)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert [json.loads(line)["step_id"] for line in shown.stdout.splitlines()] == ["s0"]


@pytest.mark.parametrize("way", ["SCRAM-SHA-512", "PLAIN", "one file", "two files"])
def test_records_pass_producer_transactions_and_reader(
    broker: SecureBroker, tmp_path: Path, way: str
) -> None:
    if "file" in way:
        pem = broker.authority.sign("client", tmp_path / "client.pem")
        key = tmp_path / "key.pem" if way == "two files" else None
        if key:
            key.write_text(pem.read_text().partition("-----BEGIN CERTIFICATE")[0])
        connection = Connection(**mutual(broker, ssl_certificate=pem, ssl_key=key))
    else:
        connection = Connection(**settings(broker, sasl_mechanism=way))
    topics.create(connection, partitions=1)
    written = [step("s0", "t"), end("t", steps=1)]
    write(connection, STEPS, written)
    copy(connection)
    assert [identity(record) for record in records(connection, REWARDED)] == [
        identity(record) for record in written
    ]


def wrong(broker: SecureBroker, what: str, folder: Path) -> dict[str, Any]:
    match what:
        case "password":
            return settings(broker, sasl_password=WRONG)
        case "password, PLAIN":
            return settings(broker, sasl_mechanism="PLAIN", sasl_password=WRONG)
        case "user":
            return settings(broker, sasl_username="nobody")
        case "mechanism":
            return settings(broker, sasl_mechanism="SCRAM-SHA-256")
        case "authority":
            return settings(broker, ssl_ca=Authority(folder / "other.pem").file)
        case "no authority":
            return settings(broker, ssl_ca=None)
        case "host":
            return settings(broker, bootstrap=broker.sasl_ssl.replace("127.0.0.1", "localhost"))
        case "no certificate":
            return mutual(broker)
        case "certificate":
            other = Authority(folder / "other.pem").sign("client", folder / "client.pem")
            return mutual(broker, ssl_certificate=other)
        case "no TLS":
            return settings(broker, **PLAINTEXT)
        case "login without TLS":
            return settings(broker, security_protocol="SASL_PLAINTEXT", ssl_ca=None)
        case "no login":
            return settings(broker, security_protocol="SSL", **NO_LOGIN)
        case "TLS":
            return mutual(broker, bootstrap=broker.plaintext)
        case "login":
            changes = {"security_protocol": "SASL_PLAINTEXT", "ssl_ca": None}
            return settings(broker, bootstrap=broker.plaintext, **changes)
    raise AssertionError(what)


LOGIN = r"\S+ refuses the login: .+; check sasl_mechanism, sasl_username and sasl_password"
TRUST = r"the certificate of \S+ cannot be verified; check that ssl_ca has signed it, and that .+"
OUR_CERTIFICATE = r"\S+ refuses our certificate, or .+; check ssl_certificate and ssl_key"
REFUSED = {
    "password": LOGIN,
    "password, PLAIN": LOGIN,
    "user": LOGIN,
    "mechanism": LOGIN,
    "authority": TRUST,
    "no authority": TRUST,
    "host": TRUST,
    "no certificate": OUR_CERTIFICATE,
    "certificate": OUR_CERTIFICATE,
}
HUNG_UP = {
    "no TLS": "PLAINTEXT",
    "login without TLS": "SASL_PLAINTEXT",
    "no login": "SSL",
    "TLS": "SSL",
    "login": "SASL_PLAINTEXT",
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_is_told_at_once_and_names_the_settings(
    broker: SecureBroker, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "TIMEOUT", 2 * AT_ONCE)
    connection = Connection(**wrong(broker, what, tmp_path))
    begun = time.monotonic()
    with pytest.raises(AccessRefused, match=f"^{REFUSED[what]}$") as caught:
        topics.check(connection)
    assert time.monotonic() - begun < AT_ONCE
    hides_passwords(str(caught.value))


@pytest.mark.parametrize("what", HUNG_UP)
def test_another_protocol_is_suspected_when_a_broker_hangs_up(
    broker: SecureBroker, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "TIMEOUT", WHILE)
    connection = Connection(**wrong(broker, what, tmp_path))
    advice = f"check security_protocol, which is {HUNG_UP[what]}"
    with pytest.raises(BrokerUnavailable, match=f"^no broker answers at .*; .*{advice}$"):
        topics.check(connection)


@pytest.mark.parametrize("command", [("topics", "check"), ("cat", STEPS)])
@pytest.mark.parametrize("what", ["password", "authority", "no TLS"])
def test_commands_tell_it_in_one_sentence(
    broker: SecureBroker, tmp_path: Path, what: str, command: tuple[str, ...]
) -> None:
    variables = environment(wrong(broker, what, tmp_path), tmp_path)
    begun = time.monotonic()
    done = steplog(*command, **variables)
    assert time.monotonic() - begun < topics.TIMEOUT + AT_ONCE
    assert (done.returncode, done.stdout) == (1, "")
    (sentence,) = done.stderr.splitlines()
    advice = {"password": "sasl_password", "authority": "ssl_ca", "no TLS": "security_protocol"}
    assert sentence.startswith("steplog: ")
    assert advice[what] in sentence
    hides_passwords(sentence)


@pytest.mark.parametrize("what", ["password", "authority", "no TLS"])
def test_every_client_tells_the_same_within_its_time(
    broker: SecureBroker,
    tmp_path: Path,
    what: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topics, "TIMEOUT", WHILE)
    caplog.set_level(logging.DEBUG)
    connection = Connection(**wrong(broker, what, tmp_path))
    kind: type[SteplogError] = AccessRefused if what in REFUSED else BrokerUnavailable
    sentence = REFUSED.get(what, "check security_protocol, which is PLAINTEXT")
    for client, limit in (
        (partial(send, timeout=WHILE), WHILE),
        (partial(copy, patience=WHILE), WHILE + CALL_TIMEOUT),
        (read, WHILE),
    ):
        begun = time.monotonic()
        with pytest.raises(kind, match=f"{sentence}$"):
            client(connection)
        assert time.monotonic() - begun < limit + AT_ONCE
    hides_passwords(repr(connection), str(connection), caplog.text)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("ssl_ca", None, "ssl_ca cannot be read: {file}: No such file or directory"),
        ("ssl_ca", "no certificate", "ssl_ca cannot be used: {file} holds no certificate"),
        (
            "ssl_certificate",
            None,
            "ssl_certificate cannot be read: {file}: No such file or directory",
        ),
        ("ssl_certificate", "no certificate", "ssl_certificate and ssl_key cannot be used: "),
    ],
)
def test_a_file_that_cannot_be_used_is_named_by_every_client(
    broker: SecureBroker, tmp_path: Path, name: str, content: str | None, sentence: str
) -> None:
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_text(content)
    given = settings(broker, **{name: file})
    told = sentence.format(file=file)
    for client in (send, copy, read):
        with pytest.raises(Fatal) as caught:
            client(Connection(**given))
        assert str(caught.value).startswith(told)
    done = steplog("topics", "check", **environment(given, tmp_path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"steplog: {told}")


def test_a_folder_is_no_authority(broker: SecureBroker, tmp_path: Path) -> None:
    with pytest.raises(Fatal, match=r"^ssl_ca cannot be read: \S+: Is a directory$"):
        topics.check(Connection(**settings(broker, ssl_ca=tmp_path)))


def test_a_locked_key_is_refused_and_asks_nobody(broker: SecureBroker, tmp_path: Path) -> None:
    locked = broker.authority.sign("client", tmp_path / "client.pem", password=PASSWORD)
    done = steplog(
        "topics", "check", **environment(mutual(broker, ssl_certificate=locked), tmp_path)
    )
    assert done.returncode == 1
    assert done.stderr == (
        "steplog: ssl_certificate and ssl_key cannot be used: they must be a certificate and its key "
        f"in PEM, without a password ({locked}, the same file)\n"
    )
