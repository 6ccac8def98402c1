"""What a consumer commits beside its offset: how to rebuild its state.

The committed offset is the next record to process, so the consumer lag that Kafka tools show is
right. The commit's metadata, at most 4 KiB of text, holds the rest:

    1 <rebuild offset> <pending items, as base64 of varints> [<mark of the transaction>]

The rebuild offset is the oldest record that open state needs. A pending item lies below the
committed offset and its output is not committed yet; it is named by the offset of the record that
completed it. Everything else completed below the committed offset is done.
"""

import base64
import binascii
import secrets
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from schemas.packing import encode_varint
from servicekit.errors import Fatal

MARK_BYTES = 4
MAX_TEXT = 4095 - (1 + 2 * MARK_BYTES)
"""A broker refuses a transaction with 4,096 bytes of metadata or more; the mark must fit too."""
FORMAT = "1"


class Bookmark(NamedTuple):
    rebuild: int
    pending: tuple[int, ...] = ()

    def encode(self) -> str:
        deltas = _deltas(self.rebuild, self.pending)
        packed = b"".join(encode_varint(delta) for delta in deltas)
        return f"{FORMAT} {self.rebuild} {base64.b64encode(packed).decode()}"

    @classmethod
    def parse(cls, text: str | None, committed: int) -> "Bookmark":
        """Reads a commit's metadata. Without any, another tool has committed: an operator moved the
        offset, and nothing is open."""
        if not text:
            return cls(committed)
        try:
            form, rebuild, packed = strip_mark(text).split(" ")
            if form != FORMAT:
                raise ValueError(form)
            offset = int(rebuild)
            pending = []
            for step in _unpack(base64.b64decode(packed, validate=True)):
                offset += step
                pending.append(offset)
            if not 0 <= int(rebuild) <= committed or (pending and offset >= committed):
                raise ValueError("it belongs to another commit")
            return cls(int(rebuild), tuple(pending))
        except (ValueError, binascii.Error) as error:
            raise Fatal(
                f"The commit at offset {committed} has metadata that this version cannot read "
                f"({text[:40]!r}). Is another program using this consumer group?"
            ) from error


def add_mark(text: str | None) -> str:
    """Adds a random mark that tells this commit from an equal one, so that after a time-out the
    group's offsets show whether our transaction took place."""
    return f"{text or ''} {secrets.token_hex(MARK_BYTES)}"


def strip_mark(text: str) -> str:
    return " ".join(text.split(" ")[:3])


def _deltas(start: int, offsets: Iterable[int]) -> Iterator[int]:
    for offset in offsets:
        yield offset - start
        start = offset


def _unpack(packed: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in packed:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield number
            number = shift = 0
    if shift:
        raise ValueError("the last number is cut off")
