"""The HTTP surface: which route does what, and the OpenAPI document of it.

FastAPI matches routes and writes the document. Each route then runs on bare ASGI: bodies are decoded
once, by msgspec, into exactly the fields that are used. LLM calls, which are nearly all requests, do
not even pass through FastAPI: its layers would do for them what an Endpoint does anyway.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException

from gateway import metrics
from gateway.calls import submission as whitebox
from gateway.dialects.chat import Chat
from gateway.dialects.completions import Completions
from gateway.dialects.messages import Messages, anthropic_error, count_tokens_request
from gateway.dialects.request import Dialect
from gateway.dialects.responses import Responses
from gateway.errors import ApiError, BadRequest, NotFound, TooMany, Unavailable
from gateway.gateway import Gateway
from gateway.http import bodies
from gateway.http.exchange import Exchange
from gateway.http.keys import SEPARATOR, Keys, api_key
from gateway.settings import GatewaySettings
from servicekit import distribution, tracing
from servicekit.errors import BrokerUnavailable

log = logging.getLogger(__name__)

OPERATIONS = ("/health", "/ready", "/metrics", "/policy")
"""Routes that are asked every few seconds; nobody wants traces of them."""
BASE = "/{trajectory_uid}/{prompt_uid}/v1"
TEXT = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
Handle = Callable[[Exchange], Awaitable[None]]
ErrorBody = Callable[[ApiError], bytes]


class State:
    """What routes share. `gateway` is None until all its parts run; `missing` says what for."""

    def __init__(self, settings: GatewaySettings, keys: Keys) -> None:
        self.settings = settings
        self.keys = keys
        self.gateway: Gateway | None = None
        self.missing = "the gateway is starting"
        self.running: Counter[str] = Counter()

    def ready(self) -> Gateway:
        if self.gateway is None:
            raise Unavailable(f"not ready yet: {self.missing}")
        return self.gateway


class Endpoint:
    """One route as an ASGI app: limits, errors and metrics around its work."""

    def __init__(self, state: State, name: str, handle: Handle, error_body: ErrorBody) -> None:
        self._state = state
        self._name = name
        self._handle = handle
        self._error_body = error_body
        self._seconds = metrics.http_request_seconds.labels(name)
        self._answered = metrics.http_requests.labels(name, "200")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send, self._state.settings.max_body_bytes)
        traced = tracing.is_enabled() and self._name not in OPERATIONS
        await (self._answer_traced if traced else self._answer)(exchange)

    async def _answer_traced(self, exchange: Exchange) -> None:
        """The span of an agent that sends one is the parent."""
        method, parent = exchange.scope["method"], exchange.header(b"traceparent") or ""
        with tracing.span(
            f"{method} {self._name}", "server", parent, method=method, route=self._name
        ) as span:
            await self._answer(exchange)
            span.set_attributes(status=exchange.status)
            if exchange.status is None or exchange.status >= 500:
                span.fail(str(exchange.status))

    async def _answer(self, exchange: Exchange) -> None:
        began = time.perf_counter()
        caller = _caller(exchange, self._state.keys)
        running = self._state.running
        running[caller] += 1
        metrics.inflight.inc()
        try:
            if running[caller] > self._state.settings.max_requests:
                raise TooMany("too many requests at the same time; wait for some to end")
            await self._handle(exchange)
        except ApiError as error:
            await self._refuse(exchange, error)
        except BrokerUnavailable as error:
            await self._refuse(exchange, Unavailable(f"the log cannot be used now: {error}"))
        except ConnectionResetError:
            return
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("%s failed", self._name, extra=_ids(exchange, self._state.keys))
            await self._refuse(exchange, ApiError("the gateway failed; its log says why"))
        finally:
            running[caller] -= 1
            if not running[caller]:
                del running[caller]
            metrics.inflight.dec()
            self._count(exchange.status, time.perf_counter() - began)

    def _count(self, status: int | None, seconds: float) -> None:
        self._seconds.observe(seconds)
        if status == 200:
            self._answered.inc()
        else:
            metrics.http_requests.labels(self._name, str(status)).inc()

    async def _refuse(self, exchange: Exchange, error: ApiError) -> None:
        exchange.stop_watching()
        if exchange.status is None:
            body = self._error_body(error)
            headers = [(b"content-type", b"application/json"), *error.headers()]
            await exchange.reply(error.status, body, headers)


def _caller(exchange: Exchange, keys: Keys) -> str:
    """Whose requests are counted together: a signed URL's tenant, a key, else everybody. A forged
    signature counts for nobody else."""
    segment: str = exchange.scope.get("path_params", {}).get("trajectory_uid", "")
    if SEPARATOR in segment:
        try:
            return keys.open(segment).tenant
        except ApiError:
            return ""
    return api_key(exchange) or ""


def _ids(exchange: Exchange, keys: Keys) -> dict[str, str]:
    """What the path names, for the log."""
    ids = dict(exchange.scope.get("path_params", {}))
    return {
        name: keys.uid_of(text) if name == "trajectory_uid" else text for name, text in ids.items()
    }


def openai_error(error: ApiError) -> bytes:
    return msgspec.json.encode(error.body())


class App(FastAPI):
    """`calls` are the endpoints of LLM calls, by what follows `/v1/` in their path."""

    def __init__(self, **about: Any) -> None:
        super().__init__(**about)
        self.calls: dict[str, Endpoint] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        call = self._call_of(scope)
        if call is None:
            await super().__call__(scope, receive, send)
        else:
            await call(scope, receive, send)

    def _call_of(self, scope: Any) -> Endpoint | None:
        """The endpoint of a call of a trajectory; puts the names in its path into the scope."""
        parts: list[str] = scope["path"].split("/", 4) if scope.get("method") == "POST" else []
        if len(parts) < 5:
            return None
        _, trajectory, prompt, api, route = parts
        if not (trajectory and prompt and api == "v1" and route in self.calls):
            return None
        scope["path_params"] = {"trajectory_uid": trajectory, "prompt_uid": prompt}
        return self.calls[route]


def make_app(state: State) -> App:
    app = App(
        title="steplog gateway",
        version=distribution.version(),
        description="LLM calls of agents, each recorded as a Step.",
        docs_url=None,
        redoc_url=None,
    )
    routes = Routes(app, state)
    routes.calls()
    routes.trajectories()
    routes.whitebox()
    routes.operations()
    app.add_exception_handler(HTTPException, _no_route)
    return app


async def _no_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = ApiError if error.status_code >= 500 else NotFound
    body = openai_error(told(f"{error.detail}: this is not a route of the gateway"))
    return Response(body, error.status_code, error.headers, "application/json")


class Routes:
    """Puts every route into the app."""

    def __init__(self, app: App, state: State) -> None:
        self._app = app
        self._state = state

    def calls(self) -> None:
        dialects: list[tuple[Dialect, type, str, ErrorBody]] = [
            (Chat(), Chat.body, "/chat/completions", openai_error),
            (Messages(), Messages.body, "/messages", anthropic_error),
            (Responses(), Responses.body, "/responses", openai_error),
            (Completions(), Completions.body, "/completions", openai_error),
        ]
        for dialect, body, path, error_body in dialects:
            self._call(dialect, body, path, error_body)
        self._add(
            "POST",
            BASE + "/messages/count_tokens",
            self._count,
            Messages.body,
            error_body=anthropic_error,
        )
        self._add(
            "POST",
            "/v1/messages/count_tokens",
            self._count,
            Messages.body,
            error_body=anthropic_error,
        )
        self._add("GET", BASE + "/models", self._models)
        self._add("GET", "/v1/models", self._models)

    def _call(self, dialect: Dialect, body: type, path: str, error_body: ErrorBody) -> None:
        async def call(exchange: Exchange) -> None:
            await self._state.ready().call(exchange, dialect)

        async def unbound_call(exchange: Exchange) -> None:
            await self._state.ready().unbound_call(exchange, dialect)

        endpoint = self._add("POST", BASE + path, call, body, error_body=error_body)
        self._app.calls[path.removeprefix("/")] = endpoint
        self._add("POST", "/v1" + path, unbound_call, body, error_body=error_body)

    async def _count(self, exchange: Exchange) -> None:
        gateway = self._state.ready()
        gateway.check_caller(exchange)
        await gateway.count_tokens(exchange, count_tokens_request(await exchange.body()))

    async def _models(self, exchange: Exchange) -> None:
        gateway = self._state.ready()
        gateway.check_caller(exchange)
        await gateway.models(exchange)

    def trajectories(self) -> None:
        def of(name: str) -> Handle:
            async def handle(exchange: Exchange) -> None:
                await getattr(self._state.ready(), name)(exchange)

            return handle

        self._add("POST", "/init_trajectory", of("init"), bodies.Init)
        self._add("POST", BASE + "/register_trajectory", of("register"), bodies.Register)
        self._add("POST", BASE + "/complete_trajectory", of("complete"), bodies.Complete)
        self._add("POST", BASE + "/feedback", of("rate"), bodies.Rate)

    def whitebox(self) -> None:
        async def submit(exchange: Exchange) -> None:
            await self._state.ready().submit(exchange, _channel(exchange))

        async def generate(exchange: Exchange) -> None:
            await self._state.ready().generate(exchange)

        async def compute_reward(exchange: Exchange) -> None:
            await self._state.ready().compute_reward(exchange)

        self._add("POST", "/generate", generate, whitebox.GenerateBody)
        self._add("POST", "/submit_steps", submit, whitebox.SubmitBody, query=["channel"])
        self._add("POST", "/compute_reward", compute_reward, dict)

    def operations(self) -> None:
        self._add("GET", "/health", _health)
        self._add("GET", "/ready", self._ready)
        self._add("GET", "/metrics", self._metrics)
        self._add("GET", "/policy", self._policy)

    async def _ready(self, exchange: Exchange) -> None:
        reasons = self._state.ready().waits_for()
        if reasons:
            raise Unavailable(f"not ready: {', '.join(reasons)}")
        await exchange.reply(200, b'{"status":"ready"}')

    async def _policy(self, exchange: Exchange) -> None:
        gateway = self._state.ready()
        gateway.check_caller(exchange)
        await gateway.tell_policy(exchange)

    async def _metrics(self, exchange: Exchange) -> None:
        if self._state.gateway is not None:
            metrics.usable_engines.set(len(self._state.gateway.engines.usable()))
        await exchange.reply(200, generate_latest(), TEXT)

    def _add(
        self,
        method: str,
        path: str,
        handle: Handle,
        body: type | None = None,
        query: list[str] | None = None,
        error_body: ErrorBody = openai_error,
    ) -> Endpoint:
        self._app.add_api_route(
            path,
            _documented,
            methods=[method],
            name=path.rpartition("/")[2],
            operation_id=f"{method.lower()}{path}",
            openapi_extra=_document(path, body, query or []),
            response_class=Response,
        )
        route = self._app.router.routes[-1]
        assert isinstance(route, APIRoute)
        endpoint = Endpoint(self._state, path.replace(BASE, "/…"), handle, error_body)
        route.app = endpoint
        return endpoint


async def _documented(request: Request) -> Response:
    # FastAPI wants a function for the document; an Endpoint takes its place in the route.
    raise AssertionError(f"no Endpoint answers {request.url.path}")


async def _health(exchange: Exchange) -> None:
    await exchange.reply(200, b'{"status":"ok"}')


def _channel(exchange: Exchange) -> str:
    query: str = exchange.scope["query_string"].decode("latin-1")
    channel = parse_qs(query, keep_blank_values=True).get("channel", ["train"])[0]
    if not 1 <= len(channel) <= 100 or not channel.isprintable():
        raise BadRequest("channel must be 1 to 100 printable characters", param="channel")
    return channel


def _document(path: str, body: type | None, query: list[str]) -> dict[str, Any]:
    """The parts of the OpenAPI document that FastAPI would take from a function's signature."""
    text = {"type": "string", "minLength": 1, "maxLength": 100}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": text}
        for name in ("trajectory_uid", "prompt_uid")
        if f"{{{name}}}" in path
    ]
    parameters += [{"name": name, "in": "query", "schema": text} for name in query]
    described: dict[str, Any] = {"parameters": parameters, "responses": _answers()}
    if body is not None:
        schema = {"type": "object"} if body is dict else _schema(body)
        described["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return described


def _answers() -> dict[str, Any]:
    error = {"content": {"application/json": {"schema": {"type": "object"}}}}
    codes = ("400", "401", "404", "409", "413", "422", "429", "502", "503")
    return {code: {"description": "one clear sentence", **error} for code in codes}


def _schema(body: type) -> dict[str, Any]:
    """Inlined: the bodies are small, and no two routes share a part."""
    (schema,), components = msgspec.json.schema_components([body])
    inlined: dict[str, Any] = _inline(schema, components)
    return inlined


def _inline(schema: Any, components: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inline(item, components) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(components[schema["$ref"].rpartition("/")[2]], components)
    return {name: _inline(value, components) for name, value in schema.items()}
