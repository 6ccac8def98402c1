"""One HTTP request and its response, directly on ASGI: no framework is on the hot path."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from gateway.errors import BadRequest, TooLarge
from gateway.http.receipts import SCOPE_KEY

Headers = Iterable[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")

EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
STREAM_HEADERS = [EVENTS, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
MAX_UID_LENGTH = 200


class Exchange:
    """A request and its response. `status` is None until the response has begun."""

    def __init__(self, scope: Any, receive: Any, send: Any, max_body: int) -> None:
        self.scope = scope
        self.status: int | None = None
        self._receive = receive
        self._send = send
        self._max_body = max_body
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._disconnect: asyncio.Task[None] | None = None

    def header(self, name: bytes) -> str | None:
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    def uid(self, name: str) -> str:
        """The trajectory_uid or prompt_uid in the path."""
        value: str = self.scope["path_params"][name]
        if len(value) > MAX_UID_LENGTH or not value.isprintable():
            raise BadRequest(
                f"{name} in the URL must be at most {MAX_UID_LENGTH} printable characters.",
                param=name,
            )
        return value

    async def body(self) -> bytes:
        """Reads the whole body; refuses one that is too large."""
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
            raise ConnectionResetError("the client disconnected while sending its request")
        if len(body) > self._max_body:
            raise self._too_large()
        return body

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The request body exceeds the limit of {self._max_body:,} bytes.")

    def watch_disconnect(self) -> "asyncio.Task[None]":
        """A task that is done when the client has disconnected. Only after the body was read, and until
        the response ends."""
        if self._disconnect is None:
            self._disconnect = asyncio.create_task(self._until_disconnect())
        return self._disconnect

    def is_gone(self) -> Callable[[], bool]:
        """A function that tells whether the client has disconnected, until `deliver` has responded."""
        return self.watch_disconnect().done

    async def _until_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def stop_watching(self) -> bool:
        """Stops watching for a disconnect; returns whether the client is still connected."""
        is_connected = self._disconnect is None or not self._disconnect.done()
        if self._disconnect is not None:
            self._disconnect.cancel()
        return is_connected

    async def reply(self, status: int, body: bytes, headers: Headers = (JSON,)) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*headers, length])
        await self._send({"type": "http.response.body", "body": body})

    async def deliver(self, status: int, body: bytes, headers: Headers = (JSON,)) -> bool:
        """Like `reply`, but returns whether the client was connected until the response was sent. Call
        `is_gone` before waiting for anything, so that a disconnect meanwhile is noticed."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*headers, length])
        return await self.finish(body)

    async def finish(self, rest: bytes) -> bool:
        """Sends the rest of a response; returns whether the client was connected until it was sent."""
        await self.write(rest)
        await self.write(b"")  # returns when the connection has taken nearly all of it
        is_connected = self.stop_watching()
        await self.end()
        return is_connected

    async def hand_over(
        self, status: int, body: bytes, headers: Headers = (JSON,)
    ) -> "asyncio.Future[bool]":
        """Like `deliver`, but for what must not be lost: the result comes when the client has read all
        of it, or has gone before."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*headers, length])
        await self.write(body)
        await self.write(b"")
        receipt: asyncio.Future[bool]
        if self.stop_watching():
            receipt = self.scope[SCOPE_KEY].expect_receipt()
        else:
            receipt = asyncio.get_running_loop().create_future()
            receipt.set_result(False)
        await self.end()
        return receipt

    async def begin_events(self) -> None:
        """Begins a stream of server-sent events."""
        await self._start(200, STREAM_HEADERS)

    async def write(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def pass_on(self, message: Any) -> None:
        """Forwards an ASGI message of another app as the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
