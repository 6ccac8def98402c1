"""Bodies that come and go compressed, by ISA-L: a third of zlib's time, both ways."""

import asyncio

from isal import isal_zlib

from gateway.errors import TooLarge

GZIP = 31
"""zlib's word for gzip's framing."""
COMPRESS_FROM = 1000
"""Bytes. Smaller answers are never compressed: a test of Atropos' clients asserts it."""
OFFLOAD_FROM = 256 * 1024
"""Bytes that are compressed in a thread, so that polls go on meanwhile."""
LEVEL = 3
"""ISA-L's highest, in which numbers come out smaller than at the others, and no later."""


class NotGzip(Exception):
    """Bytes that are no gzip, or not all of it."""


def inflated(body: bytes, limit: int) -> bytes:
    """What was compressed, in one member or several; never more than `limit` bytes of it."""
    pieces: list[bytes] = []
    room = limit
    while body:
        member = isal_zlib.decompressobj(GZIP)
        try:
            piece = member.decompress(body, room + 1)
        except isal_zlib.error as error:  # type: ignore[misc] # its stub has an instance here
            raise NotGzip from error
        room -= len(piece)
        if room < 0:
            raise TooLarge(f"the request body is larger than {limit:,} bytes when inflated")
        if not member.eof:
            raise NotGzip
        pieces.append(piece)
        body = member.unused_data.lstrip(b"\0")  # what pads a file to whole blocks
    return b"".join(pieces)


async def compressed(body: bytes) -> bytes:
    if len(body) < OFFLOAD_FROM:
        return _gzip(body)
    return await asyncio.to_thread(_gzip, body)


def _gzip(body: bytes) -> bytes:
    return isal_zlib.compress(body, LEVEL, GZIP)
