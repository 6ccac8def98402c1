"""The connection settings of a Kafka cluster; the one place where they become client options."""

import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

from confluent_kafka import KafkaError
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from schemas import Codec
from schemas.registry import SchemaRegistry
from servicekit.errors import Fatal

MAX_RECORD_BYTES = 8 * 1024 * 1024
"""Largest record that a producer accepts. Topics allow a little more, for what a reward worker adds."""
MAX_MESSAGE_BYTES = MAX_RECORD_BYTES + 64 * 1024
"""`max.message.bytes` of our topics. Clients compare it with the uncompressed size, brokers with
the compressed batch, so what a client accepts always fits."""

SILENCE_MS = 10_000
"""After this long without an answer, plain producers and readers reconnect. Their requests take
milliseconds; the clients' defaults of 40 and 60 seconds are longer than callers wait."""


class Connection(BaseModel):
    """Which cluster to use, and how to log in to it."""

    # Otherwise pydantic's errors would show the whole input, including the password.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    bootstrap: str = Field("127.0.0.1:9092", description="Kafka brokers, as HOST:PORT[,HOST:PORT…]")
    topic_prefix: str = Field("steplog.", description="prefix of every topic's name")
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="protocol of the brokers"
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = Field(
        None, description="SASL mechanism, for a SASL protocol"
    )
    sasl_username: str | None = Field(None, description="user name for SASL")
    sasl_password: SecretStr | None = Field(None, description="password for SASL")
    ssl_ca: Path | None = Field(
        None, description="PEM file of the certificate authority of the brokers"
    )
    ssl_certificate: Path | None = Field(None, description="PEM file of the client's certificate")
    ssl_key: Path | None = Field(
        None,
        description="PEM file of the client's key, without a password, if not in ssl_certificate",
    )
    registry_url: str | None = Field(
        None,
        description="URL of a schema registry; records are then written in Confluent's framing",
    )
    group_protocol: Literal["consumer", "classic"] = Field(
        "consumer",
        description="rebalance protocol of groups: consumer (KIP-848) or classic (cooperative-sticky)",
    )

    @model_validator(mode="after")
    def _check_consistent(self) -> Self:
        protocol = self.security_protocol
        sasl = self._which_are_set("sasl_mechanism", "sasl_username", "sasl_password")
        tls = self._which_are_set("ssl_ca", "ssl_certificate", "ssl_key")
        missing = [name for name, is_set in sasl.items() if not is_set]
        if self._uses("SASL") and missing:
            raise ValueError(f"security_protocol {protocol} needs {', '.join(missing)} too")
        if any(sasl.values()) and not self._uses("SASL"):
            raise ValueError(
                f"sasl_… settings are given, but security_protocol {protocol} has no login; "
                "set security_protocol to SASL_SSL or SASL_PLAINTEXT"
            )
        if any(tls.values()) and not self._uses("SSL"):
            raise ValueError(
                f"ssl_… settings are given, but security_protocol {protocol} has no TLS; "
                "set security_protocol to SSL or SASL_SSL"
            )
        if self.ssl_key and not self.ssl_certificate:
            raise ValueError("ssl_key needs ssl_certificate too")
        return self

    def _which_are_set(self, *names: str) -> dict[str, bool]:
        return {name: bool(getattr(self, name)) for name in names}

    def _uses(self, layer: Literal["SASL", "SSL"]) -> bool:
        return layer in self.security_protocol.split("_")

    def topic_name(self, name: str) -> str:
        return self.topic_prefix + name

    def codec(self) -> Codec:
        """A codec that writes Confluent's framing with a registry, else Avro single-object encoding."""
        return Codec(SchemaRegistry(self.registry_url) if self.registry_url else None)

    def _password(self) -> str | None:
        return self.sasl_password.get_secret_value() if self.sasl_password else None

    def confluent(
        self, error_cb: Callable[[KafkaError], None] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Options of a confluent-kafka client; in keyword arguments, underscores stand for dots."""
        if self._uses("SSL"):
            self._ssl_context()  # its errors name the file that cannot be used; librdkafka's do not
        key = self.ssl_key or self.ssl_certificate
        common = {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": self.security_protocol,
            "sasl.mechanism": self.sasl_mechanism,
            "sasl.username": self.sasl_username,
            "sasl.password": self._password(),
            "ssl.ca.location": self.ssl_ca and str(self.ssl_ca),
            "ssl.certificate.location": self.ssl_certificate and str(self.ssl_certificate),
            "ssl.key.location": key and str(key),
            "logger": logging.getLogger("librdkafka"),
            "error_cb": error_cb,
            # Reconnects to a restarted broker within a second instead of ten.
            "reconnect.backoff.max.ms": 1000,
        }
        chosen = {name.replace("_", "."): value for name, value in options.items()}
        return {name: value for name, value in (common | chosen).items() if value is not None}

    def aiokafka(self, **options: Any) -> dict[str, Any]:
        """Options of an aiokafka client."""
        return {
            "bootstrap_servers": self.bootstrap,
            "security_protocol": self.security_protocol,
            "sasl_mechanism": self.sasl_mechanism or "PLAIN",
            "sasl_plain_username": self.sasl_username,
            "sasl_plain_password": self._password(),
            "ssl_context": self._ssl_context() if self._uses("SSL") else None,
            # A connection whose other end vanished silently is given up after this long.
            "request_timeout_ms": SILENCE_MS,
            **options,
        }

    def _ssl_context(self) -> ssl.SSLContext:
        for name in ("ssl_ca", "ssl_certificate", "ssl_key"):
            _check_readable(name, getattr(self, name))
        try:
            context = ssl.create_default_context(cafile=self.ssl_ca and str(self.ssl_ca))
        except ssl.SSLError as error:
            raise Fatal(f"ssl_ca cannot be used: {self.ssl_ca} holds no certificate") from error
        if self.ssl_certificate:
            try:
                # With an empty password an encrypted key is an error; without one, OpenSSL would ask.
                context.load_cert_chain(self.ssl_certificate, self.ssl_key, password="")
            except ssl.SSLError as error:
                raise Fatal(
                    "ssl_certificate and ssl_key cannot be used: they must be a certificate and its "
                    f"key in PEM, without a password ({self.ssl_certificate}, "
                    f"{self.ssl_key or 'the same file'})"
                ) from error
        return context


def _check_readable(name: str, file: Path | None) -> None:
    if file:
        try:
            file.open("rb").close()
        except OSError as error:
            raise Fatal(f"{name} cannot be read: {file}: {error.strerror}") from error
