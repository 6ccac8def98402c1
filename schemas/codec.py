"""Records to the bytes of a Kafka value and back.

Every value says its schema, so that old logs stay readable. Two framings are written, both are read:

    C3 01 <fingerprint: 8 bytes>  <Avro>    single-object encoding, the default; needs no registry
    00    <id: 4 bytes>           <Avro>    Confluent's, when a registry is given

Old schemas live in `released/`; what they wrote is read with today's schema.
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
    """Bytes that are no record of ours, or a record that its schema cannot hold."""


class UnknownSchema(SchemaError):
    """It may well be a record of ours, written by a later version."""


class Registry(Protocol):
    """What the codec needs of a schema registry."""

    def id_of(self, topic: str, schema: Schema) -> int: ...
    def schema_of(self, schema_id: int) -> Schema: ...


class WriterSchema(NamedTuple):
    """How to read what a schema wrote."""

    schema: Schema
    record_type: type[Record]
    reader: Schema | None
    """Today's schema, unless it is the one that wrote."""


class Codec:
    """Encodes and decodes records; one per process, since it remembers the registry's answers."""

    def __init__(self, registry: Registry | None = None) -> None:
        self._registry = registry
        self._registered: dict[int, WriterSchema] = {}

    def encode(self, record: Record, topic: str = "") -> bytes:
        """The value that stands in `topic`. The topic matters to a registry only."""
        schema, header = _today()[type(record)]
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
        """Asks a registry now for what `encode` will need, since its first question takes a while."""
        for record_type in record_types:
            if self._registry is not None:
                self._registry.id_of(topic, _today()[record_type][0])

    def decode(self, value: bytes | None) -> Record:
        """The record that `encode` was given, whatever framing and schema version wrote it."""
        if not value:
            raise SchemaError("the value is empty")
        if value.startswith(SINGLE_OBJECT):
            written, start = self._single_object(value), SINGLE_OBJECT_HEADER
        else:
            written, start = self._confluent(value), CONFLUENT_HEADER
        body = BytesIO(value)
        body.seek(start)
        try:
            datum: Any = fastavro.schemaless_reader(body, written.schema, written.reader)
            record = msgspec.convert(datum, written.record_type, builtin_types=(bytes,))
        # Arbitrary bytes make the decoder fail in arbitrary ways; all of them mean the same.
        except Exception as error:
            raise SchemaError(
                f"the value is no {written.record_type.__name__}: {error!r}"
            ) from error
        if body.tell() != len(value):
            raise SchemaError(
                f"{len(value) - body.tell()} bytes follow the {written.record_type.__name__}"
            )
        return record

    def type_of(self, value: bytes) -> type[Record]:
        """What a value holds, without decoding it."""
        if value.startswith(SINGLE_OBJECT):
            return self._single_object(value).record_type
        return self._confluent(value).record_type

    def _single_object(self, value: bytes) -> WriterSchema:
        written = _known().get(value[:SINGLE_OBJECT_HEADER])
        if written is None:
            fingerprint_hex = value[len(SINGLE_OBJECT) : SINGLE_OBJECT_HEADER].hex()
            raise UnknownSchema(f"this version knows no schema with fingerprint {fingerprint_hex}")
        return written

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
            self._registered[schema_id] = _known().get(_header_of(schema)) or _written(schema)
        return self._registered[schema_id]


@lru_cache(maxsize=64)
def writer_schema_id(header: bytes) -> str:
    """Names the schema that wrote a value, by what the value begins with: its fingerprint, or its id in
    a registry."""
    if header.startswith(SINGLE_OBJECT):
        return header[len(SINGLE_OBJECT) : SINGLE_OBJECT_HEADER].hex()
    return f"registry-{int.from_bytes(header[1:CONFLUENT_HEADER], 'big')}"


def current_schema(record_type: type[Record]) -> Schema:
    return _today()[record_type][0]


def single_object_header(record_type: type[Record]) -> bytes:
    """What every value of this type begins with, in the default framing."""
    return _today()[record_type][1]


@lru_cache(maxsize=1)
def _today() -> dict[type[Record], tuple[Schema, bytes]]:
    folder = resources.files("schemas")
    schemas = [parse_schema_text((folder / t.schema_file).read_text()) for t in RECORD_TYPES]
    return {t: (s, _header_of(s)) for t, s in zip(RECORD_TYPES, schemas, strict=True)}


@lru_cache(maxsize=1)
def _known() -> dict[bytes, WriterSchema]:
    """Every schema that ever wrote a record, by its single-object header; today's win."""
    folder = resources.files("schemas") / "released"
    released = [parse_schema_text(file.read_text()) for file in folder.iterdir()]
    today = [schema for schema, _ in _today().values()]
    return {_header_of(schema): _written(schema) for schema in released + today}


def _written(schema: Schema) -> WriterSchema:
    types = {f"steplog.{record_type.__name__}": record_type for record_type in RECORD_TYPES}
    if schema["name"] not in types:
        raise UnknownSchema(f"{schema['name']} is no record of this version")
    record_type = types[schema["name"]]
    today = current_schema(record_type)
    return WriterSchema(schema, record_type, None if schema is today else today)


def parse_schema_text(text: str) -> Schema:
    parsed: Any = parse_schema(json.loads(text))
    return cast(Schema, parsed)


def _header_of(schema: Schema) -> bytes:
    # fastavro prints the fingerprint in the byte order that the specification wants.
    fingerprint_hex = fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
    return SINGLE_OBJECT + bytes.fromhex(fingerprint_hex)
