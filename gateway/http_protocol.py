"""HTTP/1.1 on a connection: uvicorn's protocol, with three things that it makes cheaper for our apps.

A body up to a limit comes in one piece, when all of it is here: else reading pauses and goes on for
every 64 KiB. An answer that is whole leaves in one write, through what the scope names in
`extensions`; it also says without a task whether the client is gone. Middleware that adds to answers
must take it away. And a request that an app wants for itself, as it came, does not pass through ASGI,
which would take a quarter of the time that a small post has.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import lru_cache
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

HeaderList = list[tuple[bytes, bytes]]
Headers = Iterable[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")
PIECE = 1024 * 1024
"""Bytes of a body that an app is given at once."""
CONNECTION = "steplog.connection"
"""The extension's name in a scope."""
NOBODY_WAITS = asyncio.Event()
"""What the protocol sets when there is news of a request, for who has it already."""


class Whole:
    """A request that came whole, and its answer: an Exchange without ASGI. To the protocol it is one of
    its cycles, which it tells when the client is gone or the server ends."""

    message_event = NOBODY_WAITS

    def __init__(self, protocol: "HttpProtocol", headers: Headers, body: bytes) -> None:
        self.transport = protocol.transport
        self.flow = protocol.flow
        self.on_response = protocol.on_response_complete
        self.keep_alive = protocol.keeps_alive()
        self.disconnected = False
        self.response_started = False
        self.response_complete = False
        self.status: int | None = None
        """None until it is answered."""
        self._headers = dict(headers)
        self._body = body

    def header(self, name: bytes) -> str | None:
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def body(self) -> bytes:
        """Only once: a connection that is idle afterwards does not keep it."""
        body, self._body = self._body, b""
        return body

    def is_gone(self) -> Callable[[], bool]:
        return lambda: _is_gone(self)

    async def reply(self, status: int, body: bytes, headers: Headers = (JSON,)) -> None:
        await self.deliver(status, body, headers)

    async def deliver(self, status: int, body: bytes, headers: Headers = (JSON,)) -> bool:
        """Says whether the client was there until nearly all was on its way."""
        self.status = status
        return await _answer(self, status, headers, body)


Serve = Callable[[Whole], Coroutine[Any, Any, None]]


class DirectApp(Protocol):
    """An app that wants some requests for itself. Longer bodies come by ASGI."""

    max_body: int

    def direct(self, method: bytes, url: bytes, headers: HeaderList) -> Serve | None:
        """What serves such a request; None: ASGI does."""


class Connection:
    """The way back to the client of one request that came by ASGI."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def is_gone(self) -> bool:
        """Whether the client is; not known any more once it has its answer."""
        return _is_gone(self._cycle)

    async def answer(self, status: int, headers: Headers, body: bytes) -> bool:
        """Sends all of it; says whether the client was there until nearly all was on its way."""
        return await _answer(self._cycle, status, headers, body)


AnyCycle = RequestResponseCycle | Whole


def _is_gone(cycle: AnyCycle) -> bool:
    """uvicorn tells only the last one of the requests that a client sent without waiting."""
    return cycle.disconnected or cycle.transport.is_closing()


async def _answer(cycle: AnyCycle, status: int, headers: Headers, body: bytes) -> bool:
    if _is_gone(cycle):
        return False
    end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
    cycle.response_started = True
    length = b"content-length: %d\r\n" % len(body)
    cycle.transport.writelines([_head(status, tuple(headers)), length, end, body])
    if cycle.flow.write_paused:
        await cycle.flow.drain()
    here = not _is_gone(cycle)
    cycle.response_complete = True
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
    return here


@lru_cache
def _head(status: int, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """The same ones begin most answers."""
    return STATUS_LINE[status] + b"".join(b"%b: %b\r\n" % header for header in headers)


class HttpProtocol(HttpToolsProtocol):
    def __init__(self, *, direct: DirectApp | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._direct = direct
        self._serve: Serve | None = None
        """Of a request that does not pass through ASGI, until all of it is here."""
        self._pieces: list[bytes] = []
        self._room = 0
        """Bytes that it may still bring."""

    def keeps_alive(self) -> bool:
        version: str = self.parser.get_http_version()
        return version != "1.0" and bool(self.parser.should_keep_alive())

    def on_headers_complete(self) -> None:
        self._serve = self._found()
        if self._serve is None:
            super().on_headers_complete()

    def _found(self) -> Serve | None:
        direct, before = self._direct, self.cycle
        # Requests that follow each other at once are for ASGI, which has them wait for their turn.
        if direct is None or self.expect_100_continue or (before and not before.response_complete):
            return None
        self._pieces, self._room = [], min(PIECE, direct.max_body)
        return direct.direct(self.parser.get_method(), self.url, self.headers)

    def on_body(self, body: bytes) -> None:
        if self._serve is not None:
            self._pieces.append(body)
            self._room -= len(body)
            if self._room < 0:
                self._pass_on()
            return
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > PIECE:
            self.flow.pause_reading()
            cycle.message_event.set()

    def _pass_on(self) -> None:
        """To ASGI: it is too long to come at once."""
        self._serve = None
        super().on_headers_complete()
        self.on_body(b"".join(self._pieces))

    def on_message_complete(self) -> None:
        serve, self._serve = self._serve, None
        if serve is None:
            super().on_message_complete()
            return
        request: Any = Whole(self, self.headers, b"".join(self._pieces))
        self.cycle = request
        self._start(serve(request))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        scope: Any = cycle.scope  # extensions may hold anything
        scope["extensions"] = {CONNECTION: Connection(cycle)}
        super()._start_asgi_task(cycle, app)
