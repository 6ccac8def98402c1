"""The HTTP server of our own apps: httptools, no log of its own, no header that nobody reads."""

from typing import Any

import uvicorn

KEEP_ALIVE = 75
"""Seconds that an idle connection of a client stays open."""


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
            http="httptools",
            ws="none",
            **options,
        )
    )
