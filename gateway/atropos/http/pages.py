"""Status pages and documentation of the Atropos server: they need no key and no rebuilt state."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.middleware.gzip import GZipMiddleware

from gateway.atropos.http.compression import COMPRESS_FROM, LEVEL
from gateway.atropos.http.routes import describe_routes
from servicekit import distribution
from servicekit.status import make_status_app

TITLE = "steplog atropos"
DOCUMENT = "/openapi.json"
PAGES = frozenset(("/health", "/ready", "/metrics", "/docs", DOCUMENT))


def make_pages(find_problem: Callable[[], str | None]) -> FastAPI:
    pages = make_status_app(TITLE, find_problem)
    pages.version = distribution.version()
    pages.description = "The Atropos rollout API on the log."
    pages.add_middleware(GZipMiddleware, minimum_size=COMPRESS_FROM, compresslevel=LEVEL)
    document = _with_routes(pages.openapi())

    @pages.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        prefix = request.scope.get("root_path", "")
        return get_swagger_ui_html(openapi_url=prefix + DOCUMENT, title=TITLE)

    pages.openapi = lambda: document  # type: ignore[method-assign] # FastAPI's way to extend it
    return pages


def _with_routes(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's description of the status pages, and ours of the API."""
    paths, schemas = describe_routes()
    document["paths"] |= paths
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    return document
