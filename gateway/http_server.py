"""The HTTP server of our own apps: no log of its own, no header that nobody reads."""

import asyncio
import socket
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import uvicorn

from gateway.http_protocol import DirectApp, HttpProtocol

KEEP_ALIVE = 75
"""Seconds that an idle connection of a client stays open."""


def http_server(
    app: Any, drain_s: int, direct: DirectApp | None = None, **options: Any
) -> uvicorn.Server:
    """`drain_s` is what running requests get at the end."""
    protocol: Any = partial(HttpProtocol, direct=direct)
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
            http=protocol,
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
