"""Records as plain JSON values, for people, `jq` and data frames.

Field names are the schema's. Packed numbers become arrays, JSON text is parsed, and other bytes become
hexadecimal, according to the schema's `logicalType`. Writers are not checked, so text that is not valid
JSON stays text, and bytes that cannot be unpacked become hexadecimal.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from schemas.codec import Schema, current_schema
from schemas.packing import unpack_doubles, unpack_ids, unpack_logprobs
from schemas.records import Record

UNPACK: dict[str, Callable[[Any], Any]] = {
    "int32-le": lambda packed: unpack_ids(packed).tolist(),
    "float32-le": lambda packed: unpack_logprobs(packed).tolist(),
    "float64-le": lambda packed: unpack_doubles(packed).tolist(),
    "json": msgspec.json.decode,
}


def to_plain(record: Record) -> dict[str, Any]:
    datum = msgspec.to_builtins(record, builtin_types=(bytes,))
    return _fields(current_schema(type(record)), datum)


def _fields(schema: Schema, datum: dict[str, Any]) -> dict[str, Any]:
    return {f["name"]: _value(f["type"], datum[f["name"]]) for f in schema["fields"]}


def _value(kind: Any, value: Any) -> Any:
    if isinstance(kind, list):
        kind = next(branch for branch in kind if branch != "null")
    if value is None or not isinstance(kind, dict):
        return _text(value)
    if kind.get("logicalType") in UNPACK:
        try:
            return UNPACK[kind["logicalType"]](value)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            return _text(value)
    if kind["type"] == "array":
        return [_value(kind["items"], item) for item in value]
    return _fields(kind, value) if kind["type"] == "record" else value


def _text(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value
