"""A scored group on the wire and in the log: the 14 fields of Atropos' ScoredData, as they came.

Numbers are packed once, when they come, straight from JSON: no Python object is made of any of them.
They become JSON again when a batch is handed out; packed, they take a third of its memory. What is
JSON of any shape stays JSON.
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
"""What `[` may begin with in a string."""
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


class PostedGroup(NamedTuple):
    """A group that was posted: the fields of its record, and what a repeated post is known by."""

    content: dict[str, Any]
    fingerprint: bytes

    @property
    def env_id(self) -> int | None:
        found: int | None = self.content.get("env_id")
        return found

    @property
    def size(self) -> int:
        """Sequences of tokens in it."""
        return len(self.content["tokens"])


class UnusualBody(Exception):
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


def decode_group(body: bytes | Raw) -> PostedGroup:
    text = bytes(body)
    try:
        data: Any = simdjson.Parser().parse(text)
        content = _content(data)
        brackets = np.count_nonzero(np.frombuffer(text, np.uint8) == LIST)
        if brackets != _brackets(content) or _hides_a_list(text):
            _numbers_only.decode(text)
        return PostedGroup(content, _fingerprint(text))
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise UnusualBody from error
    except (OverflowError, RuntimeError) as error:  # the latter of integers beyond 64 bits, too
        raise UnusualBody from error


def decode_groups(body: bytes) -> list[PostedGroup]:
    try:
        items = _groups.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UnusualBody from error
    return [decode_group(item) for item in items]


def group_from_model(data: dict[str, Any]) -> PostedGroup:
    """Of what pydantic has taken and put right. JSON of any shape may have integers in it that are
    longer than those that `decode_group` reads. Raises UnicodeEncodeError."""
    numbers = json.dumps({name: data[name] for name in data if name not in ANY_SHAPE})
    shapes = {name: _any_json(data[name]) for name in ANY_SHAPE}
    whole = numbers + json.dumps(shapes, ensure_ascii=False)
    return PostedGroup(
        decode_group(numbers.encode()).content | shapes, _fingerprint(whole.encode())
    )


def _any_json(value: Any) -> Json:
    return None if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _hides_a_list(body: bytes) -> bool:
    """Whether a `[` may be written as an escape. One byte is found thirty times as fast as five, and
    groups of numbers have no escapes."""
    return ESCAPE in body and ESCAPED_LIST in body


def _fingerprint(body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(body)


def _content(data: Any) -> dict[str, Any]:
    """Of the fields of a body. Whatever is not as it should be raises something."""
    names = list(data)
    if len(set(names)) < len(names):
        raise ValueError  # the last one counts of those with one name, and this has the first
    content = {name: READ[name](data[name]) for name in names if name in READ}
    for name in ("tokens", "masks", "scores"):
        if content[name] is None:
            raise TypeError
    return content


def _brackets(content: dict[str, Any]) -> int:
    """Lists that a body with this content has, if no row of numbers has a list in it: those would be
    flattened, unseen."""
    lists = 1  # the scores
    for name, value in content.items():
        if isinstance(value, str):
            lists += value.count("[")
        elif name in NUMBERS and value is not None:
            lists += 1 + len(value)
    return lists


def _int32(number: Any) -> int | None:
    if number is None:
        return None
    if type(number) is not int:
        raise TypeError
    pack_ids([number])
    return int(number)


def _packed_ids(rows: Any) -> list[bytes]:
    given = np.frombuffer(rows.as_buffer(of_type="i"), np.int64)
    ids = given.astype(np.int32)
    if np.logical_or.reduce(ids != given):
        raise OverflowError
    return _split(ids.tobytes(), rows, ID_BYTES)


def _packed(rows: Any) -> list[bytes] | None:
    if rows is None:
        return None
    return _split(bytes(rows.as_buffer(of_type="d")), rows, DOUBLE_BYTES)


def _split(packed: bytes, rows: Any, width: int) -> list[bytes]:
    """All rows come packed as one: what costs time is a call, not a number."""
    split, start = [], 0
    for row in rows:
        end = start + len(row) * width
        split.append(packed[start:end])
        start = end
    return split


def _text(value: Any, decoder: Any) -> Json:
    """JSON of any shape that the decoder takes."""
    if value is None:
        return None
    plain = isinstance(value, simdjson.Array | simdjson.Object)
    text = value.mini if plain else _encoder.encode(value)
    decoder.decode(text)
    return bytes(text).decode()


def _scores(scores: Any) -> list[float]:
    return unpack_doubles(bytes(scores.as_buffer(of_type="d"))).tolist()


READ: dict[str, Callable[[Any], Any]] = {
    "tokens": _packed_ids,
    "masks": _packed_ids,
    "scores": _scores,
    "advantages": _packed,
    "ref_logprobs": _packed,
    "messages": partial(_text, decoder=_messages),
    "generation_params": partial(_text, decoder=_object),
    "inference_logprobs": _packed,
    "overrides": partial(_text, decoder=_objects),
    "group_overrides": partial(_text, decoder=_object),
    "images": partial(_text, decoder=_any),
    "env_id": _int32,
    "distill_token_ids": partial(_text, decoder=_distilled_ids),
    "distill_logprobs": partial(_text, decoder=_distilled_logprobs),
}
"""How each field is read; what is left out is as null."""
ANY_SHAPE = [name for name, read in READ.items() if isinstance(read, partial)]
"""Fields that stay JSON."""


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
