"""A hand-written Avro encoder for ScoredGroup, which is large and frequent.

fastavro finds the branch of a union by checking the value against each branch, down to the last row.
Here a value that is not None is the second branch, and packed rows are copied as they are.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

from schemas.packing import encode_varint, pack_doubles
from schemas.records import ScoredGroup

NULL = b"\x00"
PRESENT = b"\x02"
"""The branch of a union that follows."""
END = b"\x00"
"""Ends the blocks of an array."""
TEXTS = (
    "messages",
    "generation_params",
    "overrides",
    "group_overrides",
    "images",
    "distill_token_ids",
    "distill_logprobs",
)

T = TypeVar("T")


def encode_pieces(group: ScoredGroup) -> list[bytes]:
    """The encoded fields in the schema's order, to be joined."""
    out: list[bytes] = []
    for text in (group.group_uid, group.prompt_uid, group.run, group.channel):
        _write_text(out, text)
    out.append(_long(group.sequence))
    out.append(NULL if group.env_id is None else PRESENT + _long(group.env_id))
    _write_rows(out, group.tokens)
    _write_rows(out, group.masks)
    if group.scores:
        out += _length(len(group.scores)), pack_doubles(group.scores)
    out.append(END)
    for rows in (group.advantages, group.ref_logprobs, group.inference_logprobs):
        _write_optional(out, rows, _write_rows)
    for name in TEXTS:
        _write_optional(out, getattr(group, name), _write_text)
    out.append(_long(group.created_at))
    _write_optional(out, group.fingerprint, _write_bytes)
    out.append(_long(group.settled))
    return out


def _write_optional(
    out: list[bytes], value: T | None, write: Callable[[list[bytes], T], None]
) -> None:
    if value is None:
        out.append(NULL)
    else:
        out.append(PRESENT)
        write(out, value)


def _write_text(out: list[bytes], text: str) -> None:
    _write_bytes(out, text.encode())


def _write_bytes(out: list[bytes], data: bytes) -> None:
    out += _length(len(data)), data


def _write_rows(out: list[bytes], rows: Sequence[bytes]) -> None:
    if rows:
        out.append(_length(len(rows)))
        for row in rows:
            out += _length(len(row)), row
    out.append(END)


def _long(number: int) -> bytes:
    """Zigzag encoding: small numbers are short, whatever their sign."""
    return encode_varint(number << 1 if number >= 0 else ~(number << 1))


_length = lru_cache(_long)
"""Cached, since the same lengths recur."""
