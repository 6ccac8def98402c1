"""Records to the bytes of a Kafka value and back.

Every value says its schema, so that old logs stay readable. Two framings are written, both are read:

    C3 01 <fingerprint: 8 bytes>  <Avro>    single-object encoding, the default; needs no registry
    00    <id: 4 bytes>           <Avro>    Confluent's, when a registry is given

Old schemas live in `released/`; what they wrote is read with today's schema.
"""

import json
from functools import lru_cache
from importlib import resources
from io import BytesIO
from typing import Any, Protocol, cast

import fastavro
import msgspec
from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

from schemas.records import RECORD_TYPES, Record

SINGLE_OBJECT = b"\xc3\x01"
CONFLUENT = b"\x00"
SINGLE_OBJECT_HEADER = len(SINGLE_OBJECT) + 8
CONFLUENT_HEADER = len(CONFLUENT) + 4

Schema = dict[str, Any]


class SchemaError(ValueError):
    """Bytes that are no record of ours, or a record that its schema cannot hold."""


class Registry(Protocol):
    """What the codec needs of a schema registry."""

    def id_of(self, topic: str, schema: Schema) -> int: ...
    def schema_of(self, schema_id: int) -> Schema: ...


class Codec:
    """Encodes and decodes records; one per process, since it remembers the registry's answers."""

    def __init__(self, registry: Registry | None = None) -> None:
        self._registry = registry

    def encode(self, record: Record, topic: str = "") -> bytes:
        """The value that stands in `topic`. The topic matters to a registry only."""
        schema = current_schema(type(record))
        out = BytesIO()
        out.write(self._header(schema, topic))
        try:
            datum = msgspec.to_builtins(record, builtin_types=(bytes,))
            fastavro.schemaless_writer(out, schema, datum)
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise SchemaError(
                f"{type(record).__name__} does not fit its schema: {error}"
            ) from error
        return out.getvalue()

    def decode(self, value: bytes | None) -> Record:
        """The record that `encode` was given, whatever framing and schema version wrote it."""
        if not value:
            raise SchemaError("the value is empty")
        writer, start = self._writer(value)
        record_type = _record_type(writer["name"])
        current = current_schema(record_type)
        body = BytesIO(value)
        body.seek(start)
        try:
            reader = None if writer is current else current
            datum: Any = fastavro.schemaless_reader(body, writer, reader)
            record = msgspec.convert(datum, record_type, builtin_types=(bytes,))
        # Arbitrary bytes make the decoder fail in arbitrary ways; all of them mean the same.
        except Exception as error:
            raise SchemaError(f"the value is no {record_type.__name__}: {error!r}") from error
        if body.tell() != len(value):
            raise SchemaError(
                f"{len(value) - body.tell()} bytes follow the {record_type.__name__} in the value"
            )
        return record

    def _header(self, schema: Schema, topic: str) -> bytes:
        if self._registry is None:
            return single_object_header(schema["name"])
        return CONFLUENT + self._registry.id_of(topic, schema).to_bytes(4, "big")

    def _writer(self, value: bytes) -> tuple[Schema, int]:
        """The schema that wrote `value`, and where its Avro begins."""
        if value.startswith(SINGLE_OBJECT):
            schema = known_schemas().get(value[:SINGLE_OBJECT_HEADER])
            if schema is None:
                mark = value[len(SINGLE_OBJECT) : SINGLE_OBJECT_HEADER].hex()
                raise SchemaError(f"no schema with fingerprint {mark} is known to this version")
            return schema, SINGLE_OBJECT_HEADER
        if value.startswith(CONFLUENT) and len(value) >= CONFLUENT_HEADER:
            schema_id = int.from_bytes(value[1:CONFLUENT_HEADER], "big")
            if self._registry is None:
                raise SchemaError(f"schema id {schema_id} needs a registry, and none is configured")
            return self._registry.schema_of(schema_id), CONFLUENT_HEADER
        raise SchemaError(f"the value begins with {value[:2].hex()}, which is no framing of ours")


def parse(text: str) -> Schema:
    """A schema as the codec uses it; the same object for the same content as a known schema."""
    parsed = _parse(text)
    return known_schemas().get(_header_of(parsed), parsed)


def single_object_header(schema_name: str) -> bytes:
    return _current()[schema_name][1]


def current_schema(record_type: type[Record]) -> Schema:
    return _current()[f"steplog.{record_type.__name__}"][0]


@lru_cache(maxsize=1)
def known_schemas() -> dict[bytes, Schema]:
    """Every schema that ever wrote a record, by its single-object header; today's win."""
    folder = resources.files("schemas") / "released"
    released = (_parse(file.read_text()) for file in folder.iterdir())
    today = (schema for schema, _ in _current().values())
    return {_header_of(schema): schema for schemas in (released, today) for schema in schemas}


@lru_cache(maxsize=1)
def _current() -> dict[str, tuple[Schema, bytes]]:
    folder = resources.files("schemas")
    schemas = [
        _parse((folder / record_type.schema_file).read_text()) for record_type in RECORD_TYPES
    ]
    return {schema["name"]: (schema, _header_of(schema)) for schema in schemas}


def _parse(text: str) -> Schema:
    parsed: Any = parse_schema(json.loads(text))
    return cast(Schema, parsed)


def _header_of(schema: Schema) -> bytes:
    # fastavro prints the fingerprint in the byte order that the specification wants.
    mark = fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
    return SINGLE_OBJECT + bytes.fromhex(mark)


def _record_type(schema_name: str) -> type[Record]:
    try:
        return _types_by_name()[schema_name]
    except KeyError:
        raise SchemaError(f"{schema_name} is no record of this version") from None


@lru_cache(maxsize=1)
def _types_by_name() -> dict[str, type[Record]]:
    return {f"steplog.{record_type.__name__}": record_type for record_type in RECORD_TYPES}
