"""Routes of agents that handle token ids themselves: generate, submit Steps, compute a reward."""

from urllib.parse import parse_qs

import aiohttp

from gateway.calls.submission import SubmitBody
from gateway.dialects.generate import (
    GenerateBody,
    TokenLevelRequest,
    own_shape_answer,
    parse_own_shape,
    parse_token_level,
    prompt_logprobs_answer,
    token_level_answer,
)
from gateway.engines.affinity import ANYWHERE
from gateway.engines.engine import ENGINE_ERRORS
from gateway.errors import BadRequest, EngineFailed, NotConfigured, Unprocessable
from gateway.http.exchange import Exchange
from gateway.routes.llm_calls import cap_response_tokens
from gateway.routes.parts import GatewayParts, GatewayState, prompt_scope
from gateway.routes.route import RouteSpec

REWARD_TIMEOUT = aiohttp.ClientTimeout(total=120)
MAX_CHANNEL_LENGTH = 100


async def generate(state: GatewayState, exchange: Exchange) -> None:
    """Token ids in, token ids out. In steplog's own shape nothing is recorded: the agent submits
    its Steps. Clients that use another server's shape do not know steplog, so their samples are
    recorded."""
    parts = state.require_parts()
    tenant = parts.tenant(exchange)
    body = await exchange.body()
    token_level = parse_token_level(body)
    if token_level is not None:
        await _serve_token_level(parts, exchange, token_level, body, tenant)
        return
    request, prompt = parse_own_shape(body)
    generation = await parts.generator.generate(request, prompt, ANYWHERE, None)
    await exchange.reply(200, own_shape_answer(generation.sample))


async def _serve_token_level(
    parts: GatewayParts,
    exchange: Exchange,
    token_level: TokenLevelRequest,
    body: bytes,
    tenant: str,
) -> None:
    request = cap_response_tokens(token_level.request, parts.settings)
    renderer = parts.generator.renderer
    prompt = renderer.prompt(request).ids
    if token_level.prompt_logprobs is not None:
        logprobs = await parts.generator.prompt_logprobs(prompt, token_level.prompt_logprobs)
        await exchange.reply(200, prompt_logprobs_answer(prompt, logprobs))
        return
    parts.log.check()
    steps = await parts.unbound_calls.sample(
        exchange, request, token_level.count, body, tenant, prompt_scope(tenant)
    )
    await exchange.reply(200, token_level_answer(token_level, steps, prompt, renderer))


async def submit_steps(state: GatewayState, exchange: Exchange) -> None:
    parts = state.require_parts()
    channel = _channel(exchange)
    tenant = parts.tenant(exchange)
    parts.log.check()
    body = await exchange.body()
    accepted = await parts.submission.submit(body, channel, tenant, prompt_scope(tenant))
    await exchange.reply(200, b'{"accepted":%d}' % accepted)


def _channel(exchange: Exchange) -> str:
    query: str = exchange.scope["query_string"].decode("latin-1")
    channel = parse_qs(query, keep_blank_values=True).get("channel", ["train"])[0]
    if not 1 <= len(channel) <= MAX_CHANNEL_LENGTH or not channel.isprintable():
        raise BadRequest(
            f"channel must be 1 to {MAX_CHANNEL_LENGTH} printable characters.", param="channel"
        )
    return channel


async def compute_reward(state: GatewayState, exchange: Exchange) -> None:
    """Forwards the body to a reward worker and returns its answer."""
    parts = state.require_parts()
    parts.tenant(exchange)
    body = await exchange.body()
    if parts.settings.reward is None:
        raise NotConfigured("No reward worker is configured. Start the gateway with --reward URL.")
    url = f"{parts.settings.reward.rstrip('/')}/compute_reward"
    await exchange.reply(200, await _post_reward(parts.engines.session, url, body))


async def _post_reward(session: aiohttp.ClientSession, url: str, body: bytes) -> bytes:
    headers = {"content-type": "application/json"}
    try:
        async with session.post(
            url, data=body, headers=headers, timeout=REWARD_TIMEOUT
        ) as response:
            answer = await response.read()
    except ENGINE_ERRORS as error:
        raise EngineFailed(
            "The reward worker did not respond. Check that it is running, then retry."
        ) from error
    if response.status in (400, 422):
        message = answer[:500].decode("utf-8", "replace")
        raise Unprocessable(f"The reward worker rejected the request: {message}")
    if response.status != 200:
        raise EngineFailed(
            f"The reward worker responded with HTTP {response.status}; its log has the details."
        )
    return answer


ROUTES: list[RouteSpec] = [
    RouteSpec(
        "POST",
        "/generate",
        generate,
        "Generates from token ids, in steplog's, vLLM's or SGLang's shape",
        (400, 401, 413, 429, 502, 503),
        GenerateBody,
    ),
    RouteSpec(
        "POST",
        "/submit_steps",
        submit_steps,
        "Records Steps that an agent sampled itself",
        (400, 401, 404, 409, 413, 422, 429, 503),
        SubmitBody,
        query=("channel",),
        conditions={
            422: "Ids and logprobs differ in number, no sampler gives such a logprob, a policy_version "
            "was never opened, a reward is not finite, or one trajectory has two prompt_uids."
        },
    ),
    RouteSpec(
        "POST",
        "/compute_reward",
        compute_reward,
        "Computes a reward with a reward worker",
        (401, 413, 422, 429, 502, 503),
        dict,
        conditions={
            422: "The reward worker rejected the request.",
            502: "The reward worker did not respond, or failed.",
            503: "No reward worker is configured (--reward), or the gateway is starting.",
        },
    ),
]
