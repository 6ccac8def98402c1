"""Handlers of registration, status and reset."""

import secrets
from typing import Any

import msgspec

from gateway.atropos.http.bodies import (
    DISCONNECT_ENV,
    REGISTER,
    REGISTER_ENV,
    STATUS_ENV,
    validate_body,
)
from gateway.atropos.http.compression import reply_compressed
from gateway.atropos.scored_data import encode_group
from gateway.atropos.server import AtroposServer
from gateway.errors import NotFound
from gateway.http.exchange import Exchange

TEXT = (b"content-type", b"text/plain; charset=utf-8")
NO_EXAMPLE: dict[str, list[Any]] = {
    name: []
    for name in (
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "generation_params",
        "inference_logprobs",
        "messages",
        "images",
    )
}
"""What /latest_example answers before any group was queued, as in Atropos."""


async def show_root(_server: AtroposServer, exchange: Exchange, _: bytes) -> None:
    await exchange.reply(200, b'{"message":"AtroposLib API"}')


async def register(server: AtroposServer, exchange: Exchange, body: bytes) -> None:
    await server.register(validate_body(exchange, body, REGISTER).training())
    # 128 bits: longer than the integers that most JSON encoders accept.
    await exchange.reply(200, b'{"uuid":%d}' % secrets.randbits(128))


async def show_wandb_info(server: AtroposServer, exchange: Exchange, _: bytes) -> None:
    training = server.state.training
    group, project = (training.wandb_group, training.wandb_project) if training else (None, None)
    await _reply_json(exchange, {"group": group, "project": project})


async def show_info(server: AtroposServer, exchange: Exchange, _: bytes) -> None:
    state = server.state
    info = {"batch_size": state.batch_size, "max_token_len": state.max_token_len}
    await _reply_json(exchange, info)


async def show_latest_example(server: AtroposServer, exchange: Exchange, _: bytes) -> None:
    latest = server.state.latest
    body = encode_group(latest.record) if latest else msgspec.json.encode(NO_EXAMPLE)
    await reply_compressed(exchange, body)


async def reset(server: AtroposServer, exchange: Exchange, _: bytes) -> None:
    await server.reset()
    await exchange.reply(200, b"Reset successful", [TEXT])


async def register_env(server: AtroposServer, exchange: Exchange, body: bytes) -> None:
    host, _ = exchange.scope["client"] or ("", 0)
    env = validate_body(exchange, body, REGISTER_ENV).env(host)
    await _reply_json(exchange, await server.register_env(env))


async def disconnect_env(server: AtroposServer, exchange: Exchange, body: bytes) -> None:
    env_id = validate_body(exchange, body, DISCONNECT_ENV).env_id
    await _reply_json(exchange, await server.disconnect_env(env_id))


async def show_env_status(server: AtroposServer, exchange: Exchange, body: bytes) -> None:
    env_id = validate_body(exchange, body, STATUS_ENV).env_id
    status = await server.status_env(env_id)
    if status is None:
        raise NotFound(f"No environment has the id {env_id}.")
    await exchange.reply(200, msgspec.json.encode(status))


async def show_status(server: AtroposServer, exchange: Exchange, _: bytes) -> None:
    state = server.state
    body = b'{"current_step":%d,"queue_size":%d}' % (state.step, len(state.queue))
    await exchange.reply(200, body)


async def _reply_json(exchange: Exchange, value: Any) -> None:
    await reply_compressed(exchange, msgspec.json.encode(value))
