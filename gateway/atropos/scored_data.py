"""Converts scored groups between JSON and records: the 14 fields of Atropos' ScoredData, unchanged.

Numbers are packed straight from JSON when a group arrives; no Python object is made for any of them.
They become JSON again when a batch is handed out. Packed, they take a third of the memory. Fields of
arbitrary shape are kept as JSON text.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import simdjson
import xxhash
from msgspec import Raw

from schemas import ScoredGroup
from schemas.packing import ID_BYTES, pack_ids, unpack_doubles, unpack_ids

NULL = Raw(b"null")
Json = str | None
DOUBLE_BYTES = 8
LIST = ord("[")
ESCAPE = b"\\"
ESCAPED_LIST = b"\\u005"
"""The beginning of `[` as a JSON escape."""
NUMBER_FIELDS = ("tokens", "masks", "advantages", "ref_logprobs", "inference_logprobs")


class NumberRows(msgspec.Struct, gc=False):
    """The fields with numbers, to check strictly that rows contain nothing but numbers."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    inference_logprobs: list[list[float]] | None = None


class RequiredMessageFields(msgspec.Struct, gc=False):
    """The fields that every message must have; others are kept as well."""

    role: Raw
    content: Raw


class PostedGroup(NamedTuple):
    """A posted group: the fields of its record, and a hash by which a repeated post is recognized."""

    content: dict[str, Any]
    fingerprint: bytes

    @property
    def env_id(self) -> int | None:
        env_id: int | None = self.content.get("env_id")
        return env_id

    @property
    def size(self) -> int:
        """Number of token sequences."""
        return len(self.content["tokens"])


class UnusualBody(Exception):
    """A body that differs from what stock clients send. It may still be valid: pydantic decides."""


_any = msgspec.json.Decoder(Raw)
_groups = msgspec.json.Decoder(list[Raw])
_messages = msgspec.json.Decoder(list[list[RequiredMessageFields]])
_object = msgspec.json.Decoder(dict[str, Raw])
_objects = msgspec.json.Decoder(list[dict[str, Raw]])
_distilled_ids = msgspec.json.Decoder(list[list[list[int]]])
_distilled_logprobs = msgspec.json.Decoder(list[list[list[float]]])
_numbers_only = msgspec.json.Decoder(NumberRows)
_encoder = msgspec.json.Encoder()


def decode_group(body: bytes | Raw) -> PostedGroup:
    """Decodes a group as stock clients send it; raises UnusualBody for anything else."""
    text = bytes(body)
    try:
        data: Any = simdjson.Parser().parse(text)
        content = _content(data)
        brackets = np.count_nonzero(np.frombuffer(text, np.uint8) == LIST)
        if brackets != _count_lists(content) or _may_escape_list(text):
            _numbers_only.decode(text)
        return PostedGroup(content, _fingerprint(text))
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise UnusualBody from error
    except (OverflowError, RuntimeError) as error:  # RuntimeError: integers beyond 64 bits
        raise UnusualBody from error


def decode_groups(body: bytes) -> list[PostedGroup]:
    try:
        items = _groups.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UnusualBody from error
    return [decode_group(item) for item in items]


def group_from_model(data: dict[str, Any]) -> PostedGroup:
    """Converts a group that pydantic accepted and normalized. Fields of arbitrary shape are not decoded
    again, because they may contain longer integers than `decode_group` reads. Raises
    UnicodeEncodeError for text with lone surrogates."""
    numbers = json.dumps({name: data[name] for name in data if name not in JSON_FIELDS})
    json_fields = {name: _to_json(data[name]) for name in JSON_FIELDS}
    text = numbers + json.dumps(json_fields, ensure_ascii=False)
    return PostedGroup(
        decode_group(numbers.encode()).content | json_fields, _fingerprint(text.encode())
    )


def _to_json(value: Any) -> Json:
    return None if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _may_escape_list(body: bytes) -> bool:
    """Whether a `[` may be written as an escape. Searching for one byte is thirty times as fast as for
    five, and groups of numbers contain no escapes."""
    return ESCAPE in body and ESCAPED_LIST in body


def _fingerprint(body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(body)


def _content(data: Any) -> dict[str, Any]:
    """Packs the fields of a body. Raises an exception of some kind if one of them is unusual."""
    names = list(data)
    if len(set(names)) < len(names):
        raise ValueError  # of duplicate names JSON takes the last value, and simdjson the first
    content = {name: FIELD_READERS[name](data[name]) for name in names if name in FIELD_READERS}
    for name in ("tokens", "masks", "scores"):
        if content[name] is None:
            raise TypeError
    return content


def _count_lists(content: dict[str, Any]) -> int:
    """The number of lists in a body with this content, if no row of numbers contains a list. simdjson
    would silently flatten such rows, so a body with more lists is checked strictly."""
    lists = 1  # the scores
    for name, value in content.items():
        if isinstance(value, str):
            lists += value.count("[")
        elif name in NUMBER_FIELDS and value is not None:
            lists += 1 + len(value)
    return lists


def _int32(number: Any) -> int | None:
    if number is None:
        return None
    if type(number) is not int:
        raise TypeError
    pack_ids([number])
    return int(number)


def _pack_ids(rows: Any) -> list[bytes]:
    numbers = np.frombuffer(rows.as_buffer(of_type="i"), np.int64)
    ids = numbers.astype(np.int32)
    if np.logical_or.reduce(ids != numbers):
        raise OverflowError
    return _split(ids.tobytes(), rows, ID_BYTES)


def _pack_doubles(rows: Any) -> list[bytes] | None:
    if rows is None:
        return None
    return _split(bytes(rows.as_buffer(of_type="d")), rows, DOUBLE_BYTES)


def _split(packed: bytes, rows: Any, width: int) -> list[bytes]:
    """Splits rows that were packed together: one call for all is faster than one call per row."""
    packed_rows, start = [], 0
    for row in rows:
        end = start + len(row) * width
        packed_rows.append(packed[start:end])
        start = end
    return packed_rows


def _json_text(value: Any, decoder: Any) -> Json:
    """The value as JSON text, if the decoder accepts it."""
    if value is None:
        return None
    is_container = isinstance(value, simdjson.Array | simdjson.Object)
    text = value.mini if is_container else _encoder.encode(value)
    decoder.decode(text)
    return bytes(text).decode()


def _scores(scores: Any) -> list[float]:
    return unpack_doubles(bytes(scores.as_buffer(of_type="d"))).tolist()


FIELD_READERS: dict[str, Callable[[Any], Any]] = {
    "tokens": _pack_ids,
    "masks": _pack_ids,
    "scores": _scores,
    "advantages": _pack_doubles,
    "ref_logprobs": _pack_doubles,
    "messages": partial(_json_text, decoder=_messages),
    "generation_params": partial(_json_text, decoder=_object),
    "inference_logprobs": _pack_doubles,
    "overrides": partial(_json_text, decoder=_objects),
    "group_overrides": partial(_json_text, decoder=_object),
    "images": partial(_json_text, decoder=_any),
    "env_id": _int32,
    "distill_token_ids": partial(_json_text, decoder=_distilled_ids),
    "distill_logprobs": partial(_json_text, decoder=_distilled_logprobs),
}
"""Reads and packs each field; a missing one counts as null."""
JSON_FIELDS = [name for name, read in FIELD_READERS.items() if isinstance(read, partial)]
"""Fields that are kept as JSON text."""


def encode_group(record: ScoredGroup) -> bytes:
    return _encoder.encode(_as_json_object(record))


def encode_batch(records: list[ScoredGroup]) -> bytes:
    return b'{"batch":[' + b",".join(map(encode_group, records)) + b"]}"


def _as_json_object(record: ScoredGroup) -> dict[str, Any]:
    return {
        "tokens": [unpack_ids(packed).tolist() for packed in record.tokens],
        "masks": [unpack_ids(packed).tolist() for packed in record.masks],
        "scores": record.scores,
        "advantages": _unpack_doubles(record.advantages),
        "ref_logprobs": _unpack_doubles(record.ref_logprobs),
        "messages": _raw(record.messages),
        "generation_params": _raw(record.generation_params),
        "inference_logprobs": _unpack_doubles(record.inference_logprobs),
        "overrides": _raw(record.overrides),
        "group_overrides": _raw(record.group_overrides),
        "images": _raw(record.images),
        "env_id": record.env_id,
        "distill_token_ids": _raw(record.distill_token_ids),
        "distill_logprobs": _raw(record.distill_logprobs),
    }


def _unpack_doubles(rows: list[bytes] | None) -> list[list[float]] | None:
    return None if rows is None else [unpack_doubles(row).tolist() for row in rows]


def _raw(text: Json) -> Raw:
    return NULL if text is None else Raw(text.encode())
