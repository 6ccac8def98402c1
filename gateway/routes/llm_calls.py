"""Routes of LLM clients: chat completions, messages, responses, completions, token counts, models.

With a trajectory in the URL a call is recorded as a Step. Without one, a short probe is answered
and not recorded; longer calls need --unbound-channel."""

import time
import uuid
from typing import Any

import msgspec

from gateway.calls.answers import make_answer
from gateway.calls.call import LlmCall
from gateway.calls.delivery import deliver, deliver_recorded, send_answer
from gateway.calls.retries import find_attempt, is_marked_retry, restart_unwritten
from gateway.dialects.chat import Chat
from gateway.dialects.completions import Completions
from gateway.dialects.messages import Messages, anthropic_error, parse_count_tokens
from gateway.dialects.request import Dialect, Request
from gateway.dialects.responses import Responses
from gateway.engines.affinity import ANYWHERE
from gateway.errors import BadRequest, NotFound
from gateway.http.endpoint import ErrorBody, openai_error
from gateway.http.exchange import Exchange
from gateway.routes.parts import GatewayParts, GatewayState, prompt_scope
from gateway.routes.route import BASE_URL, RouteHandler, RouteSpec
from gateway.settings import GatewaySettings
from gateway.state.conversation import HashChain
from gateway.state.trajectory import RecordedStep
from servicekit import tracing

MAX_PROBE_TOKENS = 16
"""Agent frameworks test a URL with a call of one or a few tokens."""
MAX_PROBE_BYTES = 300
DEFAULT_MODEL = "default"
"""The name under which a client need not know which model is served."""


def serve_call(dialect: Dialect) -> RouteHandler:
    """The handler of calls that name a trajectory: each is recorded as a Step."""

    async def handle(state: GatewayState, exchange: Exchange) -> None:
        arrived = time.monotonic()
        parts = state.require_parts()
        uid, tenant, prompt_uid = parts.path_ids(exchange)
        body = await exchange.body()
        request = cap_response_tokens(dialect.parse(body), parts.settings)
        parts.log.check()
        trajectory = await parts.trajectories.for_call(uid, prompt_uid, tenant)
        chain = HashChain(request)
        request_hash = chain.request_hash(request, dialect.name)
        if is_marked_retry(exchange):
            attempt = await find_attempt(parts.trajectories, trajectory, request_hash, arrived)
        else:
            attempt = restart_unwritten(trajectory, request_hash)
        if isinstance(attempt, RecordedStep):
            prompt = trajectory.prompt_of(attempt.step) if request.token_ids else b""
            await deliver_recorded(exchange, dialect, parts.call_context, request, attempt, prompt)
            return
        call = attempt
        if call is None:
            call = LlmCall(
                parts.call_context, trajectory, request, chain, request_hash, len(body)
            ).start()
        if tracing.is_enabled():
            tracing.current().set_attributes(**call.ids)
        await deliver(exchange, dialect, call)

    return handle


def cap_response_tokens(request: Request, settings: GatewaySettings) -> Request:
    """Applies --max-response-tokens."""
    limit = settings.max_response_tokens
    if limit is not None:
        requested = request.sampling.get("max_tokens", limit)
        request.sampling["max_tokens"] = min(requested, limit)
    return request


def serve_unbound_call(dialect: Dialect) -> RouteHandler:
    """The handler of calls without a trajectory. Frameworks use them to probe the URL, which is not
    recorded; with --unbound-channel every other call becomes a trajectory of its own."""

    async def handle(state: GatewayState, exchange: Exchange) -> None:
        parts = state.require_parts()
        tenant = parts.tenant(exchange)
        body = await exchange.body()
        if parts.settings.unbound_channel is not None and not _is_probe(body):
            parts.log.check()
            await parts.unbound_calls.serve(exchange, dialect, body, tenant, prompt_scope(tenant))
            return
        request = dialect.parse(body)
        if request.sampling.get("max_tokens", MAX_PROBE_TOKENS + 1) > MAX_PROBE_TOKENS:
            raise BadRequest(
                "This URL names no trajectory, so the call would not be recorded. Use a base_url from "
                "POST /init_trajectory or /TRAJECTORY_UID/PROMPT_UID/v1, or start the gateway with "
                "--unbound-channel.",
                code="no_trajectory",
            )
        await _answer_probe(parts, exchange, dialect, request)

    return handle


async def _answer_probe(
    parts: GatewayParts, exchange: Exchange, dialect: Dialect, request: Request
) -> None:
    prompt = parts.generator.renderer.prompt(request)
    generation = await parts.generator.generate(request, prompt.ids, ANYWHERE, None)
    answer = make_answer(
        uuid.uuid4().hex,
        int(time.time()),
        generation.model,
        generation.parsed,
        generation.sample,
        len(prompt),
    )
    await send_answer(exchange, dialect, request, answer)


def _is_probe(body: bytes) -> bool:
    """One token of a short text: some frameworks send that every second as a health check."""
    if len(body) > MAX_PROBE_BYTES:
        return False
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return False
    return isinstance(fields, dict) and fields.get("max_tokens") == 1


async def count_tokens(state: GatewayState, exchange: Exchange) -> None:
    parts = state.require_parts()
    parts.check_caller(exchange)
    request = parse_count_tokens(await exchange.body())
    prompt = parts.generator.renderer.prompt(request)
    await exchange.reply(200, b'{"input_tokens":%d}' % len(prompt))


async def list_models(state: GatewayState, exchange: Exchange) -> None:
    parts = state.require_parts()
    parts.check_caller(exchange)
    cards = [_model_card(name) for name in parts.engines.models()]
    await exchange.reply(200, msgspec.json.encode({"object": "list", "data": cards}))


async def get_model(state: GatewayState, exchange: Exchange) -> None:
    parts = state.require_parts()
    parts.check_caller(exchange)
    name, served = exchange.scope["path_params"]["model"], parts.engines.models()
    if name == DEFAULT_MODEL and served:
        name = served[0]
    if name not in served:
        raise NotFound(
            f"No engine serves the model {name!r}. Use {DEFAULT_MODEL!r}, or one of: "
            f"{', '.join(served) or 'none is usable now'}.",
            param="model",
            code="model_not_found",
        )
    await exchange.reply(200, msgspec.json.encode(_model_card(name)))


def _model_card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "steplog"}


def _dialect_routes(
    dialect: Dialect, body: type, path: str, error_body: ErrorBody = openai_error
) -> list[RouteSpec]:
    return [
        RouteSpec(
            "POST",
            BASE_URL + path,
            serve_call(dialect),
            "An LLM call of a trajectory, recorded as a Step",
            (400, 401, 404, 409, 413, 429, 502, 503),
            body,
            error_body=error_body,
            is_hot=True,
        ),
        RouteSpec(
            "POST",
            "/v1" + path,
            serve_unbound_call(dialect),
            "An LLM call without a trajectory: a short probe, or any call with --unbound-channel",
            (400, 401, 413, 429, 502, 503),
            body,
            error_body=error_body,
            conditions={
                400: "The body is invalid, or the call is longer than a probe and the gateway runs "
                "without --unbound-channel."
            },
        ),
    ]


def _count_tokens_route(base: str) -> RouteSpec:
    return RouteSpec(
        "POST",
        base + "/messages/count_tokens",
        count_tokens,
        "The number of tokens of a prompt",
        (400, 401, 404, 413, 429, 503),
        Messages.body,
        error_body=anthropic_error,
    )


def _models_route(base: str) -> RouteSpec:
    return RouteSpec(
        "GET", base + "/models", list_models, "The models that engines serve", (401, 404, 429, 503)
    )


def _model_route(base: str) -> RouteSpec:
    return RouteSpec(
        "GET",
        base + "/models/{model:path}",
        get_model,
        "One of the models that engines serve",
        (401, 404, 429, 503),
        conditions={404: "No engine serves this model, or the base URL has expired."},
    )


ROUTES: list[RouteSpec] = [
    *_dialect_routes(Chat(), Chat.body, "/chat/completions"),
    *_dialect_routes(Messages(), Messages.body, "/messages", anthropic_error),
    *_dialect_routes(Responses(), Responses.body, "/responses"),
    *_dialect_routes(Completions(), Completions.body, "/completions"),
    *(_count_tokens_route(base) for base in (BASE_URL, "/v1")),
    *(_models_route(base) for base in (BASE_URL, "/v1")),
    *(_model_route(base) for base in (BASE_URL, "/v1")),
]
