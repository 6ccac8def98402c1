"""Routes of operators: health, readiness, metrics, and the version of the weights."""

import msgspec
from prometheus_client import generate_latest

from gateway import metrics
from gateway.errors import Unavailable
from gateway.http.exchange import Exchange
from gateway.routes.parts import GatewayState
from gateway.routes.route import RouteSpec

PROMETHEUS_TEXT = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]


async def health(_: GatewayState, exchange: Exchange) -> None:
    await exchange.reply(200, b'{"status":"ok"}')


async def ready(state: GatewayState, exchange: Exchange) -> None:
    reasons = state.require_parts().unready_reasons()
    if reasons:
        raise Unavailable(f"The gateway is not ready: {', '.join(reasons)}.")
    await exchange.reply(200, b'{"status":"ready"}')


async def prometheus_metrics(state: GatewayState, exchange: Exchange) -> None:
    if state.parts is not None:
        metrics.usable_engines.set(len(state.parts.engines.usable()))
    await exchange.reply(200, generate_latest(), PROMETHEUS_TEXT)


async def policy(state: GatewayState, exchange: Exchange) -> None:
    """The newest version that all engines have; null before a trainer has sent any."""
    parts = state.require_parts()
    parts.check_caller(exchange)
    live = parts.policy.live
    body = {
        "run": parts.policy.run,
        "incarnation": live and live.incarnation,
        "version": live and live.number,
    }
    await exchange.reply(200, msgspec.json.encode(body))


ROUTES: list[RouteSpec] = [
    RouteSpec("GET", "/health", health, "Whether the process is running", (429,)),
    RouteSpec("GET", "/ready", ready, "Whether calls can be served", (429, 503)),
    RouteSpec("GET", "/metrics", prometheus_metrics, "Metrics for Prometheus", (429,)),
    RouteSpec("GET", "/policy", policy, "The live version of the weights", (401, 429, 503)),
]
