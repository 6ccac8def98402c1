"""The status pages that every service has: /health, /ready and /metrics.

/health says that the process is alive and depends on nothing else. /ready says whether the service
makes progress. A service may add routes of its own to the app.
"""

import json
import socket
import threading
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest


def make_status_app(
    title: str, find_problem: Callable[[], str | None], registry: CollectorRegistry = REGISTRY
) -> FastAPI:
    """`find_problem` returns a sentence that says why the service is not ready, or None if it is."""
    app = FastAPI(title=title, docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        problem = find_problem()
        if problem is not None:
            return error_response(503, f"not ready: {problem}")
        return Response('{"status":"ready"}', media_type="application/json")

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


def make_status_server(app: FastAPI) -> uvicorn.Server:
    """A server for status pages: it writes no log lines of its own."""
    return uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))


def serve_in_thread(app: FastAPI, listener: socket.socket) -> uvicorn.Server:
    """Serves the app in a daemon thread, which cannot delay the service or the end of the process.
    Setting `should_exit` of the returned server stops it."""
    server = make_status_server(app)
    threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="status", daemon=True
    ).start()
    return server


def error_response(status: int, message: str) -> Response:
    """An error in the shape of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "unavailable"
    body = {"error": {"message": message, "type": kind, "param": None}}
    return Response(json.dumps(body), status, media_type="application/json")
