"""How to reach a cluster: the one place where settings become client options."""

import logging
import ssl
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from schemas import Codec
from schemas.registry import SchemaRegistry

MAX_RECORD_BYTES = 8 * 1024 * 1024
"""Largest record that a producer takes. Topics allow a little more, for a reward worker's notes."""
MAX_MESSAGE_BYTES = MAX_RECORD_BYTES + 64 * 1024
"""`max.message.bytes` of our topics. Clients compare it with the uncompressed size, brokers with
the compressed batch, so what a client takes always fits."""


class Connection(BaseModel):
    """The cluster, and how to log in to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bootstrap: str = Field("127.0.0.1:9092", description="Kafka brokers, as HOST:PORT[,HOST:PORT…]")
    topic_prefix: str = Field("steplog.", description="put before every topic's name")
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="how to talk to the brokers"
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = Field(
        None, description="how to log in, with a SASL protocol"
    )
    sasl_username: str | None = Field(None, description="user name for SASL")
    sasl_password: SecretStr | None = Field(None, description="password for SASL")
    ssl_ca: Path | None = Field(
        None, description="PEM file of the authority that signed the brokers"
    )
    ssl_certificate: Path | None = Field(None, description="PEM file of the client's certificate")
    ssl_key: Path | None = Field(None, description="PEM file of the client's key")
    registry_url: str | None = Field(
        None, description="schema registry; turns Confluent's framing on for what is written"
    )
    group_protocol: Literal["consumer", "classic"] = Field(
        "consumer",
        description="how groups rebalance: consumer (KIP-848) or classic (cooperative-sticky)",
    )

    def topic_name(self, name: str) -> str:
        return self.topic_prefix + name

    def codec(self) -> Codec:
        """Writes Confluent's framing with a registry, else Avro single-object encoding."""
        return Codec(SchemaRegistry(self.registry_url) if self.registry_url else None)

    def _password(self) -> str | None:
        return self.sasl_password.get_secret_value() if self.sasl_password else None

    def confluent(self, **options: Any) -> dict[str, Any]:
        """Options of a confluent-kafka client; dots are written as underscores."""
        common = {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": self.security_protocol,
            "sasl.mechanism": self.sasl_mechanism,
            "sasl.username": self.sasl_username,
            "sasl.password": self._password(),
            "ssl.ca.location": self.ssl_ca and str(self.ssl_ca),
            "ssl.certificate.location": self.ssl_certificate and str(self.ssl_certificate),
            "ssl.key.location": self.ssl_key and str(self.ssl_key),
            "logger": logging.getLogger("librdkafka"),
            # A broker that restarts is found again in a second instead of ten.
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
            "ssl_context": self._ssl_context()
            if "SSL" in self.security_protocol.split("_")
            else None,
            **options,
        }

    def _ssl_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ssl_ca and str(self.ssl_ca))
        if self.ssl_certificate:
            context.load_cert_chain(self.ssl_certificate, self.ssl_key)
        return context
