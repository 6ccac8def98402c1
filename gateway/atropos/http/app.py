"""The HTTP surface of the Atropos API: an ASGI app without a framework between request and handler.

Every route of the API is in the table of `routes`. The app checks the key, reads the body, waits until
the state is rebuilt and calls the route's handler; errors become answers in FastAPI's format, which is
that of Atropos' own server. Status pages and documentation are a small FastAPI app beside it, which
answers before the state is rebuilt.
"""

import logging
import time
from collections.abc import Awaitable
from functools import lru_cache
from typing import Any

import msgspec
from prometheus_client import Counter, Histogram
from starlette.middleware.cors import CORSMiddleware

from gateway.atropos import metrics
from gateway.atropos.http.bodies import InvalidBody
from gateway.atropos.http.compression import InvalidGzip, inflate
from gateway.atropos.http.gate import Gate
from gateway.atropos.http.pages import PAGES, make_pages
from gateway.atropos.http.routes import ROUTES, Route
from gateway.errors import ApiError
from gateway.http.exchange import JSON, Exchange, Headers
from gateway.http.keys import Keys, api_key

log = logging.getLogger(__name__)

TEXT = (b"content-type", b"text/plain; charset=utf-8")
OTHER = "other"
"""Label in metrics of routes that are called rarely, and of unknown paths."""


class AtroposApp:
    """CORS is as open as that of Atropos' own server; only browsers ask for it."""

    def __init__(self, gate: Gate, max_body: int, keys: Keys) -> None:
        self._max_body = max_body
        self._gate = gate
        self._keys = keys
        self._pages = make_pages(lambda: gate.find_problem())
        self._routes = {(route.method, route.path): route for route in ROUTES}
        self._with_cors = CORSMiddleware(
            self._serve,
            allow_origins=["*"],
            allow_methods=["*"],
            allow_headers=["*"],
            allow_credentials=True,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_from_browser = b"origin" in dict(scope["headers"])
        await (self._with_cors if is_from_browser else self._serve)(scope, receive, send)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send, self._max_body)
        route = self._routes.get((scope["method"], scope["path"]))
        label = route.path if route is not None and route.is_hot else OTHER
        try:
            if scope["path"] in PAGES:
                work = self._pages(scope, receive, exchange.pass_on)
            elif route is not None:
                work = self._call(route, exchange)
            else:
                work = self._refuse_unknown(exchange)
            await self._answer(exchange, label, work)
        finally:
            exchange.stop_watching()

    async def _answer(self, exchange: Exchange, label: str, work: Awaitable[None]) -> None:
        """Awaits the work; its failures become answers."""
        began = time.perf_counter()
        try:
            await work
        except ApiError as error:
            await _reply_detail(exchange, error.status, str(error), error.headers())
        except InvalidBody as error:
            await exchange.reply(422, error.response_body())
        except InvalidGzip:
            await exchange.reply(400, b"Invalid gzip payload", [TEXT])
        except ConnectionResetError:
            return
        except Exception:
            log.exception("%s %s failed", exchange.scope["method"], exchange.scope["path"])
            await _reply_detail(exchange, 500, "The server failed. Its log contains the reason.")
        finally:
            _count(label, exchange.status, began)

    async def _call(self, route: Route, exchange: Exchange) -> None:
        self._check_key(exchange)
        body = await self._read_body(exchange)
        await route.handle(await self._gate.wait_until_open(), exchange, body)

    async def _refuse_unknown(self, exchange: Exchange) -> None:
        """404, 405, or a redirect from a known path with a slash at its end."""
        self._check_key(exchange)
        path: str = exchange.scope["path"]
        if methods := self._methods_of(path):
            allow = (b"allow", ", ".join(methods).encode())
            await _reply_detail(exchange, 405, "Method Not Allowed", [allow])
        elif path.endswith("/") and self._methods_of(path.rstrip("/")):
            target: str = exchange.scope.get("root_path", "") + path.rstrip("/")
            await exchange.reply(307, b"", [(b"location", target.encode())])
        else:
            await _reply_detail(exchange, 404, "Not Found")

    def _methods_of(self, path: str) -> list[str]:
        return [route.method for route in ROUTES if route.path == path]

    def _check_key(self, exchange: Exchange) -> None:
        if self._keys.are_required:
            self._keys.tenant(api_key(exchange))

    async def _read_body(self, exchange: Exchange) -> bytes:
        body = await exchange.body()
        if "gzip" in (exchange.header(b"content-encoding") or "").lower():
            return inflate(body, self._max_body)
        return body


async def _reply_detail(
    exchange: Exchange, status: int, detail: str, headers: Headers = ()
) -> None:
    if exchange.status is None:
        body = msgspec.json.encode({"detail": detail})
        await exchange.reply(status, body, [JSON, *headers])


def _count(label: str, status: int | None, began: float) -> None:
    answered, seconds = _meters(label, status)
    answered.inc()
    seconds.observe(time.perf_counter() - began)


@lru_cache
def _meters(label: str, status: int | None) -> tuple[Counter, Histogram]:
    """Cached, because looking them up costs more than counting."""
    answered = metrics.requests.labels(label, str(status))
    return answered, metrics.request_seconds.labels(label)
