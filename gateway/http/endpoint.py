"""One route as an ASGI app: request limits, error responses, metrics and a trace around its handler."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from gateway import metrics
from gateway.errors import ApiError, TooMany, Unavailable
from gateway.http.exchange import Exchange
from gateway.http.keys import SEPARATOR, Keys, api_key
from gateway.waits import EventPace
from servicekit import tracing
from servicekit.errors import BrokerUnavailable

log = logging.getLogger(__name__)

UNTRACED_ROUTES = ("/health", "/ready", "/metrics", "/policy")
"""Polled every few seconds; traces of them would only be noise."""

Handler = Callable[[Exchange], Awaitable[None]]
ErrorBody = Callable[[ApiError], bytes]


def openai_error(error: ApiError) -> bytes:
    return msgspec.json.encode(error.body())


class RequestLimit:
    """Limits the requests that each caller has in progress."""

    def __init__(self, keys: Keys, max_requests: int) -> None:
        self._keys = keys
        self._max_requests = max_requests
        self._running: Counter[str] = Counter()
        self._paces: dict[str, EventPace] = {}
        """How fast the requests of callers end that have met the limit."""

    def enter(self, exchange: Exchange) -> str:
        """Counts a request; returns its caller, to be passed to `leave`."""
        caller = self._caller(exchange)
        self._running[caller] += 1
        return caller

    def check(self, caller: str) -> None:
        if self._running[caller] > self._max_requests:
            pace = self._paces.setdefault(caller, EventPace())
            raise TooMany(
                f"Too many concurrent requests (limit {self._max_requests}). Retry when some of them "
                "have finished.",
                wait_s=pace.expected_wait(time.monotonic()),
            )

    def leave(self, caller: str) -> None:
        if caller in self._paces and self._running[caller] <= self._max_requests:
            self._paces[caller].record(time.monotonic())
        self._running[caller] -= 1
        if not self._running[caller]:
            del self._running[caller]
            self._paces.pop(caller, None)

    def _caller(self, exchange: Exchange) -> str:
        """The tenant of a signed URL, or the API key; everybody else counts together. A forged
        signature does not count against the tenant that it names."""
        segment: str = exchange.scope.get("path_params", {}).get("trajectory_uid", "")
        if SEPARATOR in segment:
            try:
                return self._keys.verify(segment).tenant
            except ApiError:
                return ""
        return api_key(exchange) or ""

    def path_ids(self, exchange: Exchange) -> dict[str, str]:
        """The ids in the path, for the log: without signatures."""
        ids: dict[str, str] = dict(exchange.scope.get("path_params", {}))
        if "trajectory_uid" in ids:
            ids["trajectory_uid"] = self._keys.uid_of(ids["trajectory_uid"])
        return ids


class Endpoint:
    """The ASGI app of one route. `name` is its label in metrics and traces."""

    def __init__(
        self,
        name: str,
        handler: Handler,
        error_body: ErrorBody,
        limit: RequestLimit,
        max_body_bytes: int,
    ) -> None:
        self._name = name
        self._handler = handler
        self._error_body = error_body
        self._limit = limit
        self._max_body_bytes = max_body_bytes
        self._is_traced = name not in UNTRACED_ROUTES
        self._seconds = metrics.http_request_seconds.labels(name)
        self._responses_200 = metrics.http_requests.labels(name, "200")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send, self._max_body_bytes)
        serve = self._serve_traced if self._is_traced and tracing.is_enabled() else self._serve
        await serve(exchange)

    async def _serve_traced(self, exchange: Exchange) -> None:
        """Serves in a span; the span that an agent sends becomes its parent."""
        method, parent = exchange.scope["method"], exchange.header(b"traceparent") or ""
        with tracing.span(
            f"{method} {self._name}", "server", parent, method=method, route=self._name
        ) as span:
            await self._serve(exchange)
            span.set_attributes(status=exchange.status)
            if exchange.status is None or exchange.status >= 500:
                span.fail(str(exchange.status))

    async def _serve(self, exchange: Exchange) -> None:
        started = time.perf_counter()
        caller = self._limit.enter(exchange)
        metrics.inflight.inc()
        try:
            self._limit.check(caller)
            await self._handler(exchange)
        except ApiError as error:
            await self._send_error(exchange, error)
        except BrokerUnavailable as error:
            await self._send_error(
                exchange, Unavailable(f"Kafka is unavailable: {error}. Retry the request.")
            )
        except ConnectionResetError:
            return
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception(
                "Unhandled exception in %s", self._name, extra=self._limit.path_ids(exchange)
            )
            await self._send_error(
                exchange, ApiError("Internal error. The gateway's log has the details.")
            )
        finally:
            self._limit.leave(caller)
            metrics.inflight.dec()
            self._count(exchange.status, time.perf_counter() - started)

    def _count(self, status: int | None, seconds: float) -> None:
        self._seconds.observe(seconds)
        if status == 200:
            self._responses_200.inc()
        else:
            metrics.http_requests.labels(self._name, str(status)).inc()

    async def _send_error(self, exchange: Exchange, error: ApiError) -> None:
        exchange.stop_watching()
        if exchange.status is None:
            body = self._error_body(error)
            headers = [(b"content-type", b"application/json"), *error.headers()]
            await exchange.reply(error.status, body, headers)
