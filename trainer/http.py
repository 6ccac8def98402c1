"""The trainer's HTTP side: whether it lives, whether it gets on, and its metrics.

A daemon thread serves it, so that nothing here can hold a training step or the end of the process.
"""

import json
import socket
import threading
import time
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

STALLED_AFTER = 600.0
"""Seconds. One training step or one checkpoint of a large model may take minutes."""


def make_app(progressed: Callable[[], float], stalled_after: float = STALLED_AFTER) -> FastAPI:
    """`progressed` says when the trainer last committed something or changed its phase, on the
    monotonic clock."""
    app = FastAPI(title="steplog trainer", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        silent = time.monotonic() - progressed()
        if silent > stalled_after:
            message = f"not ready: nothing was committed and no phase changed for {silent:.0f} s"
            body = {"error": {"message": message, "type": "unavailable", "param": None}}
            return Response(json.dumps(body), 503, media_type="application/json")
        return Response('{"status":"ready"}', media_type="application/json")

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return app


def serve(
    listener: socket.socket,
    progressed: Callable[[], float],
    stalled_after: float = STALLED_AFTER,
) -> uvicorn.Server:
    """Begins to answer on `listener` and comes back; `should_exit` of what it gives ends it."""
    app = make_app(progressed, stalled_after)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True
    )
    thread.start()
    return server
