"""The HTTP server of our own apps: httptools, no log of its own, no header that nobody reads.

Two things cost uvicorn a third of a short request, so apps of ours may have them cheaper. A body up to
a limit comes in one piece, when all of it is here: else reading pauses and goes on for every 64 KiB.
And an answer that is whole leaves in one write, through what the scope names in `extensions`; it also
says without a task whether the client is gone. Middleware that adds to answers must take it away.
"""

import asyncio
import socket
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

KEEP_ALIVE = 75
"""Seconds that an idle connection of a client stays open."""
PIECE = 1024 * 1024
"""Bytes of a body that an app is given at once."""
CONNECTION = "steplog.connection"
"""The extension's name in a scope."""


def http_server(app: Any, drain_s: int, **options: Any) -> uvicorn.Server:
    """`drain_s` is what running requests get at the end."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=drain_s,
            lifespan="off",
            proxy_headers=False,
            http=Protocol,
            ws="none",
            **options,
        )
    )


async def serve_beside(
    server: uvicorn.Server,
    listeners: Sequence[socket.socket],
    *works: Coroutine[Any, Any, None],
) -> None:
    """Serves while the works run; ends, and raises, when one of them cannot go on."""
    tasks = [asyncio.create_task(_end_if_broken(server, work)) for work in works]
    try:
        await server.serve(sockets=list(listeners))
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for one in ended:
        if isinstance(one, Exception):
            raise one


async def _end_if_broken(server: uvicorn.Server, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        server.should_exit = True
        raise


class Connection:
    """The way back to the client of one request."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def is_gone(self) -> bool:
        """Whether the client is; not known any more once it has its answer. uvicorn tells only the
        last one of the requests that a client sent without waiting for answers."""
        return self._cycle.disconnected or self._cycle.transport.is_closing()

    async def answer(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> bool:
        """Sends all of it; says whether the client was there until nearly all was on its way."""
        cycle = self._cycle
        if self.is_gone():
            return False
        head = [STATUS_LINE[status], *(b"%b: %b\r\n" % header for header in headers)]
        head.append(b"content-length: %d\r\n" % len(body))
        head.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        cycle.response_started = True
        cycle.transport.writelines([*head, body])
        if cycle.flow.write_paused:
            await cycle.flow.drain()
        here = not self.is_gone()
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return here


class Protocol(HttpToolsProtocol):
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        scope: Any = cycle.scope  # extensions may hold anything
        scope["extensions"] = {CONNECTION: Connection(cycle)}
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > PIECE:
            self.flow.pause_reading()
            cycle.message_event.set()
