"""Records to the bytes of a Kafka value and back.

Every value names its schema, so that old logs stay readable. Values come in two framings, and both are
read:

    C3 01 <fingerprint: 8 bytes>  <Avro>    single-object encoding, the default; needs no registry
    00    <id: 4 bytes>           <Avro>    Confluent's, when a registry is given

Earlier schemas are in `released/`; what they wrote is read with the current schema.
"""

import json
from collections.abc import Iterable
from functools import lru_cache
from importlib import resources
from io import BytesIO
from typing import Any, NamedTuple, Protocol, cast

import fastavro
import msgspec
from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

from schemas import scored_group_writer
from schemas.records import RECORD_TYPES, Record, ScoredGroup

SINGLE_OBJECT = b"\xc3\x01"
CONFLUENT = b"\x00"
SINGLE_OBJECT_HEADER = len(SINGLE_OBJECT) + 8
CONFLUENT_HEADER = len(CONFLUENT) + 4

Schema = dict[str, Any]


class SchemaError(ValueError):
    """Bytes that are not a record of the log, or a record that does not fit its schema."""


class UnknownSchema(SchemaError):
    """The value's schema is not known; a later version of steplog may have written it."""


class Registry(Protocol):
    """What the codec needs from a schema registry."""

    def id_of(self, topic: str, schema: Schema) -> int: ...
    def schema_of(self, schema_id: int) -> Schema: ...


class WriterSchema(NamedTuple):
    """A schema that wrote values, and how to read them."""

    schema: Schema
    record_type: type[Record]
    reader: Schema | None
    """The current schema; None if it is the writer's."""


class Codec:
    """Encodes and decodes records; use one per process, since it caches the registry's answers."""

    def __init__(self, registry: Registry | None = None) -> None:
        self._registry = registry
        self._registered: dict[int, WriterSchema] = {}

    def encode(self, record: Record, topic: str = "") -> bytes:
        """The value to write to `topic`; the topic matters only with a registry."""
        schema, header = _current_schemas()[type(record)]
        if self._registry is not None:
            header = CONFLUENT + self._registry.id_of(topic, schema).to_bytes(4, "big")
        try:
            if isinstance(record, ScoredGroup):
                return b"".join([header, *scored_group_writer.encode_pieces(record)])
            out = BytesIO()
            out.write(header)
            datum = msgspec.to_builtins(record, builtin_types=(bytes,))
            fastavro.schemaless_writer(out, schema, datum)
            return out.getvalue()
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise SchemaError(
                f"{type(record).__name__} does not fit its schema: {error}"
            ) from error

    def prepare(self, topic: str, record_types: Iterable[type[Record]]) -> None:
        """Makes the requests to the registry that `encode` will need, since the first takes a while."""
        for record_type in record_types:
            if self._registry is not None:
                self._registry.id_of(topic, _current_schemas()[record_type][0])

    def decode(self, value: bytes | None) -> Record:
        """The record in a value, whichever framing and schema version wrote it."""
        if not value:
            raise SchemaError("the value is empty")
        if value.startswith(SINGLE_OBJECT):
            writer, start = self._single_object(value), SINGLE_OBJECT_HEADER
        else:
            writer, start = self._confluent(value), CONFLUENT_HEADER
        body = BytesIO(value)
        body.seek(start)
        try:
            datum: Any = fastavro.schemaless_reader(body, writer.schema, writer.reader)
            record = msgspec.convert(datum, writer.record_type, builtin_types=(bytes,))
        # Arbitrary bytes make the decoder fail in arbitrary ways, which all mean the same.
        except Exception as error:
            raise SchemaError(
                f"the value is not a {writer.record_type.__name__}: {error!r}"
            ) from error
        if body.tell() != len(value):
            raise SchemaError(
                f"{len(value) - body.tell()} bytes follow the {writer.record_type.__name__}"
            )
        return record

    def type_of(self, value: bytes) -> type[Record]:
        """The type of the record in a value, without decoding it."""
        if value.startswith(SINGLE_OBJECT):
            return self._single_object(value).record_type
        return self._confluent(value).record_type

    def _single_object(self, value: bytes) -> WriterSchema:
        writer = _known_schemas().get(value[:SINGLE_OBJECT_HEADER])
        if writer is None:
            fingerprint_hex = value[len(SINGLE_OBJECT) : SINGLE_OBJECT_HEADER].hex()
            raise UnknownSchema(f"this version knows no schema with fingerprint {fingerprint_hex}")
        return writer

    def _confluent(self, value: bytes) -> WriterSchema:
        if not value.startswith(CONFLUENT) or len(value) < CONFLUENT_HEADER:
            raise SchemaError(
                f"the value begins with {value[:2].hex()}, which is no framing of ours"
            )
        schema_id = int.from_bytes(value[1:CONFLUENT_HEADER], "big")
        if self._registry is None:
            raise UnknownSchema(f"schema id {schema_id} needs a registry, and none is configured")
        if schema_id not in self._registered:
            schema = self._registry.schema_of(schema_id)
            self._registered[schema_id] = _known_schemas().get(
                _header_of(schema)
            ) or _writer_schema(schema)
        return self._registered[schema_id]


@lru_cache(maxsize=64)
def writer_schema_id(header: bytes) -> str:
    """The id of the schema that wrote a value, from the value's first bytes: the schema's fingerprint,
    or its number in a registry."""
    if header.startswith(SINGLE_OBJECT):
        return header[len(SINGLE_OBJECT) : SINGLE_OBJECT_HEADER].hex()
    return f"registry-{int.from_bytes(header[1:CONFLUENT_HEADER], 'big')}"


def current_schema(record_type: type[Record]) -> Schema:
    return _current_schemas()[record_type][0]


def single_object_header(record_type: type[Record]) -> bytes:
    """The first bytes of every value of this type, in the default framing."""
    return _current_schemas()[record_type][1]


@lru_cache(maxsize=1)
def _current_schemas() -> dict[type[Record], tuple[Schema, bytes]]:
    folder = resources.files("schemas")
    schemas = [parse_schema_text((folder / t.schema_file).read_text()) for t in RECORD_TYPES]
    return {t: (s, _header_of(s)) for t, s in zip(RECORD_TYPES, schemas, strict=True)}


@lru_cache(maxsize=1)
def _known_schemas() -> dict[bytes, WriterSchema]:
    """Every schema that was ever released, by its single-object header; the current ones come last, so
    that they win."""
    folder = resources.files("schemas") / "released"
    released = [parse_schema_text(file.read_text()) for file in folder.iterdir()]
    current = [schema for schema, _ in _current_schemas().values()]
    return {_header_of(schema): _writer_schema(schema) for schema in released + current}


def _writer_schema(schema: Schema) -> WriterSchema:
    types = {f"steplog.{record_type.__name__}": record_type for record_type in RECORD_TYPES}
    if schema["name"] not in types:
        raise UnknownSchema(f"this version knows no record type {schema['name']}")
    record_type = types[schema["name"]]
    current = current_schema(record_type)
    return WriterSchema(schema, record_type, None if schema is current else current)


def parse_schema_text(text: str) -> Schema:
    parsed: Any = parse_schema(json.loads(text))
    return cast(Schema, parsed)


def _header_of(schema: Schema) -> bytes:
    # fastavro prints the fingerprint in the byte order of the specification.
    fingerprint_hex = fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
    return SINGLE_OBJECT + bytes.fromhex(fingerprint_hex)
