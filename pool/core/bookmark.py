"""What a consumer writes beside its committed offset: how to get its state back.

The committed offset is the next record to process, so that consumer lag stays true. The commit's
metadata, at most 4 KiB of text, says the rest:

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
"""A broker refuses 4,096 bytes of metadata, and the whole transaction with them; the mark must fit
too."""
FORMAT = "1"


class Bookmark(NamedTuple):
    rebuild: int
    pending: tuple[int, ...] = ()

    def text(self) -> str:
        deltas = _deltas(self.rebuild, self.pending)
        packed = b"".join(encode_varint(delta) for delta in deltas)
        return f"{FORMAT} {self.rebuild} {base64.b64encode(packed).decode()}"

    @classmethod
    def parse(cls, text: str | None, committed: int) -> "Bookmark":
        """Empty text is a commit by another tool: an operator moved the offset, nothing is open."""
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
                f"the commit at offset {committed} carries metadata that this version does not "
                f"read ({text[:40]!r}); is another program using this consumer group?"
            ) from error


def add_mark(text: str | None) -> str:
    """With a mark by which this commit is told from an equal one: after a time-out, the offsets that
    the group has tell whether our transaction took place."""
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
