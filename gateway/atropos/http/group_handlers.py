"""Handlers of the hot path: environments post scored groups, trainers take batches.

Bodies of stock clients are decoded once, straight into packed numbers. Only bodies that differ from
what stock clients send are validated by pydantic, which accepts them or refuses them in FastAPI's
words.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.atropos.http.bodies import (
    GROUP,
    GROUPS,
    InvalidBody,
    ScoredData,
    content_type,
    invalid_json,
    validate_body,
)
from gateway.atropos.http.compression import hand_over_compressed
from gateway.atropos.scored_data import (
    PostedGroup,
    UnusualBody,
    decode_group,
    decode_groups,
    encode_batch,
    group_from_model,
)
from gateway.atropos.server import NOT_REGISTERED, OWN_TRAINER, AtroposServer
from gateway.atropos.state.queue import QueuedGroup
from gateway.errors import TooLarge
from gateway.http.exchange import Exchange
from servicekit.errors import RecordTooLarge

OFFLOAD_FROM = 32
"""A batch of this many sequences is encoded in a thread, so that polls are answered meanwhile."""
RECEIVED = b'{"status":"received"}'

BufferSizes = Sequence[int | None]
"""For each posted group: the size of the buffer in which it waits, or None if it is in the queue."""


async def receive_group(server: AtroposServer, exchange: Exchange, body: bytes) -> None:
    try:
        group = _decode_stock(exchange, body, decode_group)
    except UnusualBody:
        group = _from_model(validate_body(exchange, body, GROUP))
    await _receive(server, exchange, [group], _answer_to_group)


async def receive_groups(server: AtroposServer, exchange: Exchange, body: bytes) -> None:
    try:
        groups = _decode_stock(exchange, body, decode_groups)
    except UnusualBody:
        groups = [_from_model(model) for model in validate_body(exchange, body, GROUPS)]
    await _receive(server, exchange, groups, _answer_to_list)


def _answer_to_group(sizes: BufferSizes) -> bytes:
    (size,) = sizes
    return RECEIVED if size is None else b'{"status":"buffered","buffer_size":%d}' % size


def _answer_to_list(sizes: BufferSizes) -> bytes:
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(sizes)}
    if buffered := [size for size in sizes if size is not None]:
        answer |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]}
    return msgspec.json.encode(answer)


def _decode_stock(exchange: Exchange, body: bytes, decode: Callable[[bytes], Any]) -> Any:
    if content_type(exchange) != "application/json":
        raise UnusualBody
    return decode(body)


def _from_model(model: ScoredData) -> PostedGroup:
    """A group that pydantic accepted. Its text may still contain lone surrogates."""
    try:
        return group_from_model(model.model_dump())
    except UnicodeEncodeError as error:
        raise InvalidBody([invalid_json("text that is no Unicode")]) from error


async def _receive(
    server: AtroposServer,
    exchange: Exchange,
    groups: Sequence[PostedGroup],
    make_answer: Callable[[BufferSizes], bytes],
) -> None:
    is_gone = exchange.is_gone()
    fingerprints = [group.fingerprint for group in groups]
    deliveries = await server.retries.match(fingerprints, is_gone)
    is_sent = False
    try:
        sizes = await server.post(groups, deliveries)
        is_sent = await exchange.deliver(200, make_answer(sizes))
    except RecordTooLarge as error:
        raise TooLarge(f"The group is too large for the log: {error}") from error
    finally:
        server.retries.settle(deliveries, is_sent)


async def send_batch(server: AtroposServer, exchange: Exchange, _: bytes) -> None:
    if server.has_own_trainer:
        refusal = {"status": "error", "message": OWN_TRAINER, "batch": []}
        await exchange.reply(200, msgspec.json.encode(refusal))
        return
    if server.state.training is None:
        await exchange.reply(200, msgspec.json.encode(NOT_REGISTERED))
        return
    exchange.is_gone()  # starts to watch, so that `hand_over` knows whether the client was there
    batch = await server.batch()
    if batch is None:
        await exchange.reply(200, b'{"batch":null}')
        return
    number, groups = batch
    try:
        receipt = await hand_over_compressed(exchange, await _encode(groups))
    except BaseException:
        server.release_batch(number)
        raise
    server.await_receipt(number, receipt)


async def _encode(groups: Sequence[QueuedGroup]) -> bytes:
    records = [group.record for group in groups]
    if sum(group.size for group in groups) < OFFLOAD_FROM:
        return encode_batch(records)
    return await asyncio.to_thread(encode_batch, records)
