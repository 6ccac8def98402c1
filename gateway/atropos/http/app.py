"""The HTTP surface of the Atropos API.

FastAPI has every route, for the document, for 404 and 405, and to answer what is asked rarely. What
is asked all the time (posts, batches, polls) does not pass through it: bodies are decoded once, by
msgspec, and only what stock clients do not send is looked at by pydantic, which refuses in FastAPI's
words. /health, /ready and /metrics are ours; until the state is rebuilt, all other requests wait.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from prometheus_client import Counter, Histogram
from starlette.middleware.cors import CORSMiddleware

from gateway.atropos import metrics
from gateway.atropos.http.bodies import ENV_ID, GROUP, GROUPS, ScoredData, checked, no_json, refusal
from gateway.atropos.http.compression import COMPRESS_FROM, NotGzip, compressed, inflated
from gateway.atropos.http.routes import STATUS_ROUTES, Gate, make_routes
from gateway.atropos.http.scored_data import (
    NotPlain,
    Posted,
    checked_group,
    decode_group,
    decode_groups,
    encode_batch,
)
from gateway.atropos.server import NOT_REGISTERED, Server
from gateway.atropos.state.queue import Group
from gateway.errors import ApiError, NotFound, TooLarge
from gateway.http.exchange import JSON, Exchange, Headers
from gateway.http.keys import Keys, api_key
from servicekit.errors import RecordTooLarge

log = logging.getLogger(__name__)

OFFLOAD_FROM = 32
"""Sequences of a batch that is encoded in a thread, so that polls go on meanwhile."""
TEXT = (b"content-type", b"text/plain; charset=utf-8")
VARY = (b"vary", b"Accept-Encoding")
GZIPPED = (b"content-encoding", b"gzip")
RECEIVED = b'{"status":"received"}'

Route = tuple[str, str]
Handle = Callable[[Server, Exchange, bytes], Awaitable[None]]


class AtroposApp:
    """Reads bodies, answers what is asked all the time, and leaves the rest to FastAPI.

    CORS is as open as Atropos has it; only browsers ask for it."""

    def __init__(self, gate: Gate, max_body: int, keys: Keys) -> None:
        self.max_body = max_body
        self._gate = gate
        self._keys = keys
        self._others = make_routes(gate)
        self._often: dict[Route, Handle] = {
            ("POST", "/scored_data"): _scored_data,
            ("POST", "/scored_data_list"): _scored_data_list,
            ("GET", "/batch"): _batch,
            ("GET", "/status-env"): _status_env,
            ("GET", "/status"): _status,
        }
        self._for_browsers = CORSMiddleware(
            self._answer_by_asgi,
            allow_origins=["*"],
            allow_methods=["*"],
            allow_headers=["*"],
            allow_credentials=True,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if b"origin" in dict(scope["headers"]):
            await self._for_browsers(scope, receive, send)
        else:
            await self._answer_by_asgi(scope, receive, send)

    async def _answer_by_asgi(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send, self.max_body)
        route = (scope["method"], scope["path"])
        try:
            if route in self._often:
                await self._answer_often(exchange, route)
            else:
                await self._answer(exchange, route, self._pass_on(exchange, receive))
        finally:
            exchange.stop_watching()

    async def _answer(self, exchange: Exchange, route: Route, work: Awaitable[None]) -> None:
        """What goes wrong in the work becomes an answer, too."""
        began = time.perf_counter()
        try:
            await work
        except ApiError as error:
            await _refuse(exchange, error)
        except RequestValidationError as error:
            await exchange.reply(422, refusal(error))
        except NotGzip:
            await exchange.reply(400, b"Invalid gzip payload", [TEXT])
        except ConnectionResetError:
            return
        except Exception:
            log.exception("%s %s failed", *route)
            await _refuse(exchange, ApiError("the server failed; its log says why"))
        finally:
            _count(route[1] if route in self._often else "other", exchange.status, began)

    async def _answer_often(self, exchange: Exchange, route: Route) -> None:
        await self._answer(exchange, route, self._work(exchange, self._often[route]))

    async def _work(self, exchange: Exchange, handle: Handle) -> None:
        self._check_key(exchange)
        body = await self._body(exchange)
        await handle(await self._gate.ready(), exchange, body)

    async def _pass_on(self, exchange: Exchange, receive: Any) -> None:
        """To FastAPI, which knows nothing of compressed bodies."""
        is_status = exchange.scope["path"] in STATUS_ROUTES
        if not is_status:
            self._check_key(exchange)
        body = await self._body(exchange)
        about = (b"content-encoding", b"content-length")
        headers = [header for header in exchange.scope["headers"] if header[0] not in about]
        scope = {**exchange.scope, "headers": headers}
        if not is_status:
            await self._gate.ready()
        await self._others(scope, _again(body, receive), exchange.pass_on)

    def _check_key(self, exchange: Exchange) -> None:
        if self._keys.are_required:
            self._keys.tenant(api_key(exchange))

    async def _body(self, exchange: Exchange) -> bytes:
        body = await exchange.body()
        if "gzip" in (exchange.header(b"content-encoding") or "").lower():
            return inflated(body, self.max_body)
        return body


def _again(body: bytes, receive: Any) -> Any:
    """The body once more, for FastAPI."""
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return first.pop() if first else await receive()

    return again


def _count(path: str, status: int | None, began: float) -> None:
    answered, seconds = _meters(path, status)
    answered.inc()
    seconds.observe(time.perf_counter() - began)


@lru_cache
def _meters(path: str, status: int | None) -> tuple[Counter, Histogram]:
    """Looking them up would cost more than counting."""
    answered = metrics.requests.labels(path, str(status))
    return answered, metrics.request_seconds.labels(path)


async def _refuse(exchange: Exchange, error: ApiError) -> None:
    if exchange.status is None:
        body = msgspec.json.encode({"detail": str(error)})
        await exchange.reply(error.status, body, [JSON, *error.headers()])


async def _scored_data(server: Server, exchange: Exchange, body: bytes) -> None:
    try:
        posted = _plain(exchange, body, decode_group)
    except NotPlain:
        posted = _put_right(checked(body, _content_type(exchange), GROUP))

    def told(sizes: Sequence[int | None]) -> bytes:
        return RECEIVED if sizes[0] is None else _buffered(sizes[0])

    await _post(server, exchange, [posted], told)


async def _scored_data_list(server: Server, exchange: Exchange, body: bytes) -> None:
    try:
        posted = _plain(exchange, body, decode_groups)
    except NotPlain:
        posted = [_put_right(one) for one in checked(body, _content_type(exchange), GROUPS)]
    await _post(server, exchange, posted, _told_of_all)


def _buffered(size: int) -> bytes:
    return b'{"status":"buffered","buffer_size":%d}' % size


def _told_of_all(sizes: Sequence[int | None]) -> bytes:
    told: dict[str, Any] = {"status": "received", "groups_processed": len(sizes)}
    if buffered := [size for size in sizes if size is not None]:
        told |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]}
    return msgspec.json.encode(told)


def _plain(exchange: Exchange, body: bytes, decode: Callable[[bytes], Any]) -> Any:
    if _content_type(exchange) != "application/json":
        raise NotPlain
    return decode(body)


def _put_right(taken: ScoredData) -> Posted:
    """A group that pydantic has taken; text may still be none that others can read."""
    try:
        return checked_group(taken.model_dump())
    except UnicodeEncodeError as error:
        raise RequestValidationError([no_json("text that is no Unicode")]) from error


def _content_type(exchange: Exchange) -> str:
    return exchange.header(b"content-type") or ""


async def _post(
    server: Server,
    exchange: Exchange,
    posted: Sequence[Posted],
    told: Callable[[Sequence[int | None]], bytes],
) -> None:
    gone = exchange.is_gone()
    fingerprints = [group.fingerprint for group in posted]
    deliveries = await server.retries.recognise(fingerprints, gone)
    sent = False
    try:
        sizes = await server.post(posted, deliveries)
        sent = await exchange.deliver(200, told(sizes))
    except RecordTooLarge as error:
        raise TooLarge(f"the group is not taken: {error}") from error
    finally:
        server.retries.settle(deliveries, sent)


async def _batch(server: Server, exchange: Exchange, _: bytes) -> None:
    if server.state.training is None:
        await exchange.reply(200, msgspec.json.encode(NOT_REGISTERED))
        return
    exchange.is_gone()
    found = await server.batch()
    if found is None:
        await exchange.reply(200, b'{"batch":null}')
        return
    number, groups = found
    sent = False
    try:
        body = await _encoded(groups)
        sent = await _deliver(exchange, body)
    finally:
        await server.handed(number, sent)


async def _encoded(groups: Sequence[Group]) -> bytes:
    records = [group.record for group in groups]
    if sum(group.size for group in groups) < OFFLOAD_FROM:
        return encode_batch(records)
    return await asyncio.to_thread(encode_batch, records)


async def _deliver(exchange: Exchange, body: bytes) -> bool:
    """As middleware of Starlette's would compress it, if the client is still there."""
    headers: Headers = [JSON]
    if len(body) >= COMPRESS_FROM:
        headers = [JSON, VARY]
        if "gzip" in (exchange.header(b"accept-encoding") or ""):
            body = await compressed(body)
            headers = [JSON, VARY, GZIPPED]
    return await exchange.deliver(200, body, headers)


async def _status_env(server: Server, exchange: Exchange, body: bytes) -> None:
    env_id = checked(body, _content_type(exchange), ENV_ID).env_id
    answer = await server.status_env(env_id)
    if answer is None:
        raise NotFound(f"no environment has the id {env_id}")
    await exchange.reply(200, msgspec.json.encode(answer))


async def _status(server: Server, exchange: Exchange, _: bytes) -> None:
    state = server.state
    told = b'{"current_step":%d,"queue_size":%d}' % (state.step, len(state.queue))
    await exchange.reply(200, told)
