"""The HTTP server of the gateway and of the Atropos server: uvicorn, without access log and headers
that no client reads."""

import asyncio
import socket
from collections.abc import Coroutine, Sequence
from typing import Any

import uvicorn

from gateway.http.receipts import ReceiptProtocol

KEEP_ALIVE_S = 75
"""Seconds that an idle connection of a client stays open."""


def http_server(app: Any, drain_s: int, **options: Any) -> uvicorn.Server:
    """A server for an ASGI app. On shutdown, running requests have `drain_s` seconds to end."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=drain_s,
            lifespan="off",
            proxy_headers=False,
            http=ReceiptProtocol,
            ws="none",
            **options,
        )
    )


async def serve_beside(
    server: uvicorn.Server,
    listeners: Sequence[socket.socket],
    *background: Coroutine[Any, Any, None],
) -> None:
    """Serves while the background coroutines run. When one of them fails, the server shuts down and
    the failure is raised."""
    tasks = [asyncio.create_task(_stop_on_failure(server, work)) for work in background]
    try:
        await server.serve(sockets=list(listeners))
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _stop_on_failure(server: uvicorn.Server, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        server.should_exit = True
        raise
