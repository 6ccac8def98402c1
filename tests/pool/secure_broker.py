"""A broker that lets in only who it knows, with TLS under an authority of its own.

SASL_SSL   SCRAM-SHA-512 or PLAIN, as USER with PASSWORD
SSL        clients show a certificate that the same authority has signed
PLAINTEXT  for the broker itself
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from confluent_kafka.admin import AdminClient

from steplog.kafka import broker_directory
from steplog.kafka.broker_directory import HOST, PROPERTIES
from tests.brokers import java
from tests.conftest import free_port
from tests.pool.certificates import Authority

USER = "steplog"
PASSWORD = "c0rrect-horse"
CLUSTER = "AAAAAAAAAAAAAAAAAAAAAQ"
START_LIMIT_S = 60


class SecureBroker(NamedTuple):
    """Where each of the listeners is, and who has signed for them."""

    sasl_ssl: str
    ssl: str
    plaintext: str
    authority: Authority


@contextmanager
def secure_broker(directory: Path) -> Iterator[SecureBroker]:
    """Runs in `directory`, and is killed at the end: nobody needs its data."""
    authority = Authority(directory / "ca.pem")
    authority.sign("broker", directory / "broker.pem")
    sasl_ssl, ssl, plaintext, controller = (free_port() for _ in range(4))
    broker = SecureBroker(f"{HOST}:{sasl_ssl}", f"{HOST}:{ssl}", f"{HOST}:{plaintext}", authority)
    settings = broker_directory._settings("data", plaintext, controller) | _security(
        broker, f"{HOST}:{controller}"
    )
    lines = [f"{name}={value}\n" for name, value in settings.items()]
    (directory / PROPERTIES).write_text("".join(lines))
    _format(directory)
    with (directory / "broker.log").open("w") as log:
        process = subprocess.Popen(
            java("kafka.Kafka", PROPERTIES), cwd=directory, stdout=log, stderr=log
        )
    try:
        # Nothing listens at first, which is no news; the answer comes as soon as something does.
        admin = AdminClient({"bootstrap.servers": broker.plaintext, "log_level": 0})
        admin.list_topics(timeout=START_LIMIT_S)
        yield broker
    finally:
        process.kill()
        process.wait()


def _format(directory: Path) -> None:
    user = f"SCRAM-SHA-512=[name={USER},password={PASSWORD}]"
    options = [f"--cluster-id={CLUSTER}", f"--config={PROPERTIES}", "--add-scram", user]
    tool = java("kafka.tools.StorageTool", "format", *options)
    subprocess.run(tool, cwd=directory, check=True, capture_output=True)


def _security(broker: SecureBroker, controller: str) -> dict[str, str]:
    listeners = ",".join(
        f"{name}://{getattr(broker, name.lower())}" for name in ("SASL_SSL", "SSL", "PLAINTEXT")
    )
    modules = "org.apache.kafka.common.security"
    return {
        "listeners": f"{listeners},CONTROLLER://{controller}",
        "advertised.listeners": listeners,
        "listener.security.protocol.map": (
            "SASL_SSL:SASL_SSL,SSL:SSL,PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT"
        ),
        "inter.broker.listener.name": "PLAINTEXT",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": "broker.pem",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": broker.authority.file.name,
        "listener.name.ssl.ssl.client.auth": "required",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512,PLAIN",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": (
            f"{modules}.scram.ScramLoginModule required;"
        ),
        "listener.name.sasl_ssl.plain.sasl.jaas.config": (
            f'{modules}.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
        ),
    }
