"""A Confluent-compatible schema registry, for clusters whose other tools read schemas from one.

Subjects follow TopicRecordNameStrategy, since a topic holds several record types. Services only look
schemas up; `register` belongs to the command that creates the topics.
"""

import json
import re
from typing import Any

from schemas.codec import Schema, SchemaError, current_schema, parse_schema_text
from schemas.records import Record

COMPATIBILITY = "FULL_TRANSITIVE"
"""Replay reads old records with new code; a service that was rolled back reads new records with old
code."""

TIMEOUT = 10
"""Seconds to wait for an answer; the client's default is no limit."""


class RegistryUnavailable(Exception):
    """The registry cannot be used: it does not answer, or its client is not installed."""


class SchemaRegistry:
    """Implements `schemas.codec.Registry`. It requests each schema once and then works without the
    server, so a registry that becomes unavailable later does no harm."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._name = _without_password(url)
        _client(url).close()  # reports a mistake in the address at once
        self._ids: dict[tuple[str, str], int] = {}
        self._schemas: dict[int, Schema] = {}

    def id_of(self, topic: str, schema: Schema) -> int:
        name = schema["name"]
        if (topic, name) not in self._ids:
            self._ids[topic, name] = schema_id = self._look_up(f"{topic}-{name}", schema)
            self._schemas[schema_id] = schema
        return self._ids[topic, name]

    def schema_of(self, schema_id: int) -> Schema:
        if schema_id not in self._schemas:
            refusal = f"the registry at {self._name} has no schema with id {schema_id}"
            registered = self._request(refusal, "get_schema", schema_id)
            self._schemas[schema_id] = _record_schema(registered.schema_str, schema_id)
        return self._schemas[schema_id]

    def register(self, topic: str, record_type: type[Record]) -> int:
        """Registers the record type for the topic, and makes the registry refuse breaking changes."""
        schema = current_schema(record_type)
        subject = f"{topic}-{schema['name']}"
        refusal = f"the registry at {self._name} refused the schema of {subject}"
        self._request(refusal, "set_compatibility", subject, COMPATIBILITY)
        return int(self._request(refusal, "register_schema", subject, _avro(schema)))

    def _look_up(self, subject: str, schema: Schema) -> int:
        refusal = (
            f"the registry at {self._name} does not have the current schema of {subject}; "
            "register it with `steplog topics create`"
        )
        return int(self._request(refusal, "lookup_schema", subject, _avro(schema)).schema_id)

    def _request(self, refusal: str, method: str, *arguments: Any) -> Any:
        """Calls a method of the client; `refusal` is the message if the server refuses."""
        from confluent_kafka.schema_registry.common._httpx_compat import httpx
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        try:
            with _client(self._url) as client:  # used so rarely that no connection is kept
                return getattr(client, method)(*arguments)
        except SchemaRegistryError as error:
            if error.http_status_code in (404, 409, 422):
                raise SchemaError(f"{refusal} ({error.error_message.rstrip('.')})") from error
            raise RegistryUnavailable(f"the registry at {self._name} answered: {error}") from error
        except httpx.TransportError as error:
            raise RegistryUnavailable(f"no registry answers at {self._name}: {error}") from error


def _record_schema(text: str, schema_id: int) -> Schema:
    try:
        schema = parse_schema_text(text)
        schema["name"]
    # A registry may hold schemas of any kind; ours are Avro records.
    except Exception as error:
        raise SchemaError(f"schema id {schema_id} is not an Avro record") from error
    return schema


def _without_password(url: str) -> str:
    """The URL for messages, without user and password."""
    return re.sub(r"//[^/]*@", "//", url)


def _client(url: str) -> Any:
    try:
        from confluent_kafka.schema_registry import SchemaRegistryClient
    except ImportError as error:
        raise RegistryUnavailable(
            "A schema registry needs its client: pip install 'steplog-rl[registry]'"
        ) from error
    try:
        return SchemaRegistryClient({"url": url, "timeout": TIMEOUT})
    except ValueError as error:
        name = _without_password(url)
        raise RegistryUnavailable(f"{name} is not a registry's address: {error}") from error


def _avro(schema: Schema) -> Any:
    from confluent_kafka.schema_registry import Schema as RegisteredSchema

    plain = {key: value for key, value in schema.items() if not key.startswith("__")}
    # Apicurio 3.3 refuses every schema whose text has "{}" in it, which is our default for JSON.
    text = json.dumps(plain).replace('"{}"', r'"\u007b}"')
    return RegisteredSchema(text, "AVRO")
