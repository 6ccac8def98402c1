"""A Confluent-compatible schema registry, for those whose other tools read schemas from one.

Subjects follow TopicRecordNameStrategy, since a topic holds several record types. Services only look
schemas up; `register` belongs to the command that creates the topics.
"""

import json
from typing import Any

from schemas.codec import Schema, SchemaError, current_schema, parse
from schemas.records import Record

COMPATIBILITY = "FULL_TRANSITIVE"
"""Replay reads old records with new code, a rolled-back service new records with old code."""


class RegistryUnavailable(Exception):
    """The registry gave no answer; what it would have said is not known."""


class SchemaRegistry:
    """Implements `schemas.codec.Registry`. It asks once for each schema and then works without the
    server, so a registry that goes away later stops nobody."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = _client(url)
        self._ids: dict[tuple[str, str], int] = {}
        self._schemas: dict[int, Schema] = {}

    def id_of(self, topic: str, schema: Schema) -> int:
        name = schema["name"]
        if (topic, name) not in self._ids:
            self._ids[topic, name] = self._look_up(f"{topic}-{name}", schema)
        return self._ids[topic, name]

    def schema_of(self, schema_id: int) -> Schema:
        if schema_id not in self._schemas:
            found = self._ask("get_schema", schema_id)
            if found is None:
                raise SchemaError(f"the registry at {self._url} has no schema with id {schema_id}")
            self._schemas[schema_id] = parse(found.schema_str)
        return self._schemas[schema_id]

    def register(self, topic: str, record_type: type[Record]) -> int:
        """Makes the record type known for the topic and guards it against breaking changes."""
        schema = current_schema(record_type)
        subject = f"{topic}-{schema['name']}"
        self._ask("set_compatibility", subject, COMPATIBILITY)
        schema_id = self._ask("register_schema", subject, _avro(schema))
        if schema_id is None:
            raise SchemaError(f"the registry at {self._url} refused the schema of {subject}")
        return int(schema_id)

    def _look_up(self, subject: str, schema: Schema) -> int:
        found = self._ask("lookup_schema", subject, _avro(schema))
        if found is None:
            raise SchemaError(
                f"the registry at {self._url} does not know {subject}; "
                "register it with `steplog topics create`"
            )
        return int(found.schema_id)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """The client's answer, or None where the server says there is none."""
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        try:
            return getattr(self._client, method)(*arguments)
        except SchemaRegistryError as error:
            if error.http_status_code in (404, 409, 422):
                return None
            raise RegistryUnavailable(f"the registry at {self._url} answered: {error}") from error
        except OSError as error:
            raise RegistryUnavailable(f"no registry answers at {self._url}: {error}") from error


def _client(url: str) -> Any:
    try:
        from confluent_kafka.schema_registry import SchemaRegistryClient
    except ImportError as error:
        raise RegistryUnavailable(
            "a registry needs its client: install it with pip install 'steplog[registry]'"
        ) from error
    return SchemaRegistryClient({"url": url})


def _avro(schema: Schema) -> Any:
    from confluent_kafka.schema_registry import Schema as RegisteredSchema

    plain = {key: value for key, value in schema.items() if not key.startswith("__")}
    return RegisteredSchema(json.dumps(plain), "AVRO")
