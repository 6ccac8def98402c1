"""One HTTP request and its answer, straight on ASGI: the hot path has no framework in between."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from gateway.errors import BadRequest, TooLarge

Headers = Iterable[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
STREAM_HEADERS = [EVENTS, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
MAX_UID = 200


class Exchange:
    """`status` is None until the answer has begun."""

    def __init__(self, scope: Any, receive: Any, send: Any, max_body: int) -> None:
        self.scope = scope
        self.status: int | None = None
        self._receive = receive
        self._send = send
        self._max_body = max_body
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._gone: asyncio.Task[None] | None = None

    def header(self, name: bytes) -> str | None:
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    def uid(self, name: str) -> str:
        """A part of the path that names a trajectory or a prompt."""
        value: str = self.scope["path_params"][name]
        if len(value) > MAX_UID or not value.isprintable():
            raise BadRequest(f"{name} must be at most {MAX_UID} printable characters", param=name)
        return value

    async def body(self) -> bytes:
        declared = self.header(b"content-length")
        if declared is not None and declared.isdecimal() and int(declared) > self._max_body:
            raise self._too_large()
        message = await self._receive()
        body: bytes = message.get("body", b"")
        if message.get("more_body"):
            pieces, length = [body], len(body)
            while message.get("more_body") and length <= self._max_body:
                message = await self._receive()
                pieces.append(message.get("body", b""))
                length += len(pieces[-1])
            body = b"".join(pieces)
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client went away while it sent its request")
        if len(body) > self._max_body:
            raise self._too_large()
        return body

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the request body is larger than {self._max_body:,} bytes")

    def watch(self) -> "asyncio.Task[None]":
        """Done when the client is gone. Only after the body was read, and until the answer ends."""
        if self._gone is None:
            self._gone = asyncio.create_task(self._until_gone())
        return self._gone

    def is_gone(self) -> Callable[[], bool]:
        """Tells whether the client is gone, at any time until `deliver` has answered."""
        return self.watch().done

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def stop_watching(self) -> bool:
        """Whether the client is still there."""
        here = self._gone is None or not self._gone.done()
        if self._gone is not None:
            self._gone.cancel()
        return here

    async def reply(self, status: int, body: bytes, headers: Headers = (JSON,)) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*headers, length])
        await self._send({"type": "http.response.body", "body": body})

    async def deliver(self, status: int, body: bytes, headers: Headers = (JSON,)) -> bool:
        """As `reply`; says whether the client was there until all was on its way. `is_gone` must have
        been asked for before whatever was waited for."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*headers, length])
        await self.write(body)
        await self.write(b"")  # returns when the connection has taken nearly all of it
        here = self.stop_watching()
        await self.end()
        return here

    async def begin_events(self) -> None:
        await self._start(200, STREAM_HEADERS)

    async def write(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def pass_on(self, message: Any) -> None:
        """What another app sends as the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
