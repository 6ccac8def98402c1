"""A scored group on the wire and in the log: the 14 fields of Atropos' ScoredData, as they came.

Numbers are packed once, when they come, and turned back into JSON when a batch is handed out: that
takes a third of the memory that JSON takes, and a hundredth of its own server's time. What is JSON of
any shape stays the text that was sent.
"""

import hashlib
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from schemas import ScoredGroup
from schemas.packing import pack_doubles, pack_ids, unpack_doubles, unpack_ids

NULL = Raw(b"null")
Json = str | None
Objects = list[dict[str, Raw]]


class ScoredData(msgspec.Struct, kw_only=True, gc=False):
    """As clients send it."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: Raw = NULL
    generation_params: Raw = NULL
    inference_logprobs: list[list[float]] | None = None
    overrides: Raw = NULL
    group_overrides: Raw = NULL
    images: Raw = NULL
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None


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


_group = msgspec.json.Decoder(ScoredData)
_groups = msgspec.json.Decoder(list[Raw])
_messages = msgspec.json.Decoder(list[list[Message]] | None)
_object = msgspec.json.Decoder(dict[str, Raw] | None)
_objects = msgspec.json.Decoder(Objects | None)
_encoder = msgspec.json.Encoder()


def decode_group(body: bytes | Raw) -> Posted:
    try:
        return Posted(_content(_group.decode(body)), _fingerprint(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise NotPlain from error


def decode_groups(body: bytes) -> list[Posted]:
    try:
        items = _groups.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise NotPlain from error
    return [decode_group(item) for item in items]


def _fingerprint(body: bytes | Raw) -> bytes:
    return hashlib.sha256(body).digest()[:16]


def _content(data: ScoredData) -> dict[str, Any]:
    _messages.decode(data.messages)
    _object.decode(data.generation_params)
    _object.decode(data.group_overrides)
    _objects.decode(data.overrides)
    return {
        "tokens": [pack_ids(ids) for ids in data.tokens],
        "masks": [pack_ids(ids) for ids in data.masks],
        "scores": data.scores,
        "advantages": _packed(data.advantages),
        "ref_logprobs": _packed(data.ref_logprobs),
        "messages": _text(data.messages),
        "generation_params": _text(data.generation_params),
        "inference_logprobs": _packed(data.inference_logprobs),
        "overrides": _text(data.overrides),
        "group_overrides": _text(data.group_overrides),
        "images": _text(data.images),
        "env_id": None if data.env_id is None else _int32(data.env_id),
        "distill_token_ids": _json(data.distill_token_ids),
        "distill_logprobs": _json(data.distill_logprobs),
    }


def _int32(number: int) -> int:
    pack_ids([number])
    return number


def _packed(rows: list[list[float]] | None) -> list[bytes] | None:
    return None if rows is None else [pack_doubles(row) for row in rows]


def _text(raw: Raw) -> Json:
    text = bytes(raw).decode()
    return None if text == "null" else text


def _json(value: Any) -> Json:
    return None if value is None else _encoder.encode(value).decode()


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
