"""The routes by which every process of ours tells how it is: /health, /ready and /metrics.

/health says that the process lives and asks nobody. /ready says whether it gets on with its work.
"""

import json
from collections.abc import Callable

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest


def make_status_app(
    title: str, problem: Callable[[], str | None], registry: CollectorRegistry = REGISTRY
) -> FastAPI:
    """`problem` says in a sentence why the process is not ready; None: it is."""
    app = FastAPI(title=title, docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        told = problem()
        if told is not None:
            return told_error(503, f"not ready: {told}")
        return Response('{"status":"ready"}', media_type="application/json")

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


def told_error(status: int, message: str) -> Response:
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "unavailable"
    body = {"error": {"message": message, "type": kind, "param": None}}
    return Response(json.dumps(body), status, media_type="application/json")
