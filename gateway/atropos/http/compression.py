"""Gzip of request and response bodies by ISA-L, which takes a third of zlib's time."""

import asyncio

from isal import isal_zlib

from gateway.errors import TooLarge
from gateway.http.exchange import JSON, Exchange, Headers

GZIP = 31
"""zlib's `wbits` for gzip."""
COMPRESS_FROM = 1000
"""Bytes; smaller responses are not compressed, which a test of Atropos' clients asserts."""
OFFLOAD_FROM = 256 * 1024
"""Bytes; larger responses are compressed in a thread, so that polls are answered meanwhile."""
LEVEL = 3
"""ISA-L's highest level: for numbers it is the smallest and no slower than the others."""
VARY = (b"vary", b"Accept-Encoding")
GZIPPED = (b"content-encoding", b"gzip")


class InvalidGzip(Exception):
    """The body is not gzip, or it is truncated."""


def inflate(body: bytes, limit: int) -> bytes:
    """Decompresses a body of one or more gzip members. Raises TooLarge as soon as the result exceeds
    `limit` bytes."""
    pieces: list[bytes] = []
    room = limit
    while body:
        member = isal_zlib.decompressobj(GZIP)
        try:
            piece = member.decompress(body, room + 1)
        except isal_zlib.error as error:  # type: ignore[misc] # its stub has an instance here
            raise InvalidGzip from error
        room -= len(piece)
        if room < 0:
            raise TooLarge(f"The request body exceeds the limit of {limit:,} bytes when inflated.")
        if not member.eof:
            raise InvalidGzip
        pieces.append(piece)
        body = member.unused_data.lstrip(b"\0")  # padding to whole blocks
    return b"".join(pieces)


async def reply_compressed(exchange: Exchange, body: bytes) -> None:
    """Answers 200 with JSON, compressed under the same conditions as Starlette's middleware has."""
    body, headers = await _encode(exchange, body)
    await exchange.reply(200, body, headers)


async def hand_over_compressed(exchange: Exchange, body: bytes) -> "asyncio.Future[bool]":
    """Like `reply_compressed`; the result tells whether the client has read all of it."""
    body, headers = await _encode(exchange, body)
    return await exchange.hand_over(200, body, headers)


async def _encode(exchange: Exchange, body: bytes) -> tuple[bytes, Headers]:
    headers = [JSON]
    if len(body) >= COMPRESS_FROM:
        headers.append(VARY)
        if "gzip" in (exchange.header(b"accept-encoding") or ""):
            body = await _compress(body)
            headers.append(GZIPPED)
    return body, headers


async def _compress(body: bytes) -> bytes:
    if len(body) < OFFLOAD_FROM:
        return _gzip(body)
    return await asyncio.to_thread(_gzip, body)


def _gzip(body: bytes) -> bytes:
    return isal_zlib.compress(body, LEVEL, GZIP)
