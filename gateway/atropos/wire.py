"""A scored group on the wire and in the log: the 14 fields of Atropos' ScoredData, as they came.

Numbers are packed once, when they come, straight from JSON: no Python object is made of any of them.
They become JSON again when a batch is handed out; packed, they take a third of its memory. What is
JSON of any shape stays JSON.
"""

import hashlib
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import simdjson
from msgspec import Raw

from schemas import ScoredGroup
from schemas.packing import ID_BYTES, pack_ids, unpack_doubles, unpack_ids

NULL = Raw(b"null")
Json = str | None
DOUBLE_BYTES = 8
INT32 = np.iinfo(np.int32)
NUMBERS = ("tokens", "masks", "advantages", "ref_logprobs", "inference_logprobs")


class Numbers(msgspec.Struct, gc=False):
    """The rows of numbers, for a second look at them."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    inference_logprobs: list[list[float]] | None = None


class Message(msgspec.Struct, gc=False):
    """What every message must have; whatever else it has is kept."""

    role: Raw
    content: Raw


class Posted(NamedTuple):
    """A group that was posted: the fields of its record, and what a repeated post is known by."""

    content: dict[str, Any]
    fingerprint: bytes


class NotPlain(Exception):
    """A body that is not what stock clients send: it needs a closer look, and may still be right."""


_any = msgspec.json.Decoder(Raw)
_groups = msgspec.json.Decoder(list[Raw])
_messages = msgspec.json.Decoder(list[list[Message]])
_object = msgspec.json.Decoder(dict[str, Raw])
_objects = msgspec.json.Decoder(list[dict[str, Raw]])
_distilled_ids = msgspec.json.Decoder(list[list[list[int]]])
_distilled_logprobs = msgspec.json.Decoder(list[list[list[float]]])
_numbers_only = msgspec.json.Decoder(Numbers)
_encoder = msgspec.json.Encoder()


def decode_group(body: bytes | Raw) -> Posted:
    text = bytes(body)
    try:
        data: Any = simdjson.Parser().parse(text)
        content = _content({name: data[name] for name in data})
        if text.count(b"[") != _brackets(content):
            _numbers_only.decode(text)
        return Posted(content, _fingerprint(text))
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise NotPlain from error
    except (OverflowError, RecursionError) as error:
        raise NotPlain from error


def decode_groups(body: bytes) -> list[Posted]:
    try:
        items = _groups.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise NotPlain from error
    return [decode_group(item) for item in items]


def _fingerprint(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:16]


def _content(data: Any) -> dict[str, Any]:
    """Of the fields of a body. Whatever is not as it should be raises something."""
    env_id = data.get("env_id")
    return {
        "tokens": _packed_ids(data["tokens"]),
        "masks": _packed_ids(data["masks"]),
        "scores": unpack_doubles(bytes(data["scores"].as_buffer(of_type="d"))).tolist(),
        "advantages": _packed(data.get("advantages")),
        "ref_logprobs": _packed(data.get("ref_logprobs")),
        "messages": _text(data.get("messages"), _messages),
        "generation_params": _text(data.get("generation_params"), _object),
        "inference_logprobs": _packed(data.get("inference_logprobs")),
        "overrides": _text(data.get("overrides"), _objects),
        "group_overrides": _text(data.get("group_overrides"), _object),
        "images": _text(data.get("images"), _any),
        "env_id": None if env_id is None else _int32(env_id),
        "distill_token_ids": _text(data.get("distill_token_ids"), _distilled_ids),
        "distill_logprobs": _text(data.get("distill_logprobs"), _distilled_logprobs),
    }


def _brackets(content: dict[str, Any]) -> int:
    """Lists that a body with this content has, if no row of numbers has a list in it: those would be
    flattened, unseen."""
    rows = [content[name] for name in NUMBERS if content[name] is not None]
    texts = [value for value in content.values() if isinstance(value, str)]
    return 1 + sum(1 + len(row) for row in rows) + sum(text.count("[") for text in texts)


def _int32(number: Any) -> int:
    if type(number) is not int:
        raise TypeError
    pack_ids([number])
    return number


def _packed_ids(rows: Any) -> list[bytes]:
    ids = np.frombuffer(rows.as_buffer(of_type="i"), np.int64)
    if len(ids) and not (INT32.min <= ids.min() and ids.max() <= INT32.max):
        raise OverflowError
    return _split(ids.astype(np.int32).tobytes(), rows, ID_BYTES)


def _packed(rows: Any) -> list[bytes] | None:
    if rows is None:
        return None
    return _split(bytes(rows.as_buffer(of_type="d")), rows, DOUBLE_BYTES)


def _split(packed: bytes, rows: Any, width: int) -> list[bytes]:
    """All rows come packed as one: what costs time is a call, not a number."""
    ends = list(accumulate((len(row) * width for row in rows), initial=0))
    return [packed[start:end] for start, end in pairwise(ends)]


def _text(value: Any, decoder: Any) -> Json:
    """JSON of any shape that the decoder takes."""
    if value is None:
        return None
    plain = isinstance(value, simdjson.Array | simdjson.Object)
    text = value.mini if plain else _encoder.encode(value)
    decoder.decode(text)
    return bytes(text).decode()


def encode_group(record: ScoredGroup) -> bytes:
    return _encoder.encode(_data(record))


def encode_batch(records: list[ScoredGroup]) -> bytes:
    return b'{"batch":[' + b",".join(map(encode_group, records)) + b"]}"


def _data(record: ScoredGroup) -> dict[str, Any]:
    return {
        "tokens": [unpack_ids(packed).tolist() for packed in record.tokens],
        "masks": [unpack_ids(packed).tolist() for packed in record.masks],
        "scores": record.scores,
        "advantages": _numbers(record.advantages),
        "ref_logprobs": _numbers(record.ref_logprobs),
        "messages": _raw(record.messages),
        "generation_params": _raw(record.generation_params),
        "inference_logprobs": _numbers(record.inference_logprobs),
        "overrides": _raw(record.overrides),
        "group_overrides": _raw(record.group_overrides),
        "images": _raw(record.images),
        "env_id": record.env_id,
        "distill_token_ids": _raw(record.distill_token_ids),
        "distill_logprobs": _raw(record.distill_logprobs),
    }


def _numbers(rows: list[bytes] | None) -> list[list[float]] | None:
    return None if rows is None else [unpack_doubles(row).tolist() for row in rows]


def _raw(text: Json) -> Raw:
    return NULL if text is None else Raw(text.encode())
