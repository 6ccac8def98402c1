"""Delivers a call's answer, as one response or as a stream, to the first client or to a retry.

The end of an answer is sent only after the Step is durable. An answer is delivered when the connection
has taken all of it; if the client disconnects before that, a note on the Step says so. A retry that is
served later withdraws the note.
"""

import asyncio

from gateway import metrics
from gateway.calls.answers import as_delta, rebuild_answer
from gateway.calls.call import CallContext, LlmCall
from gateway.dialects.request import Answer, Dialect, Request
from gateway.errors import ApiError, Unavailable
from gateway.http.exchange import Exchange
from gateway.state.notes import delivery_note
from gateway.state.trajectory import RecordedStep


async def deliver(exchange: Exchange, dialect: Dialect, call: LlmCall) -> None:
    """Responds with a running call. If the client disconnects, the call runs on for a while."""
    call.join()
    disconnect = exchange.watch_disconnect()
    try:
        if call.request.stream:
            is_delivered = await _deliver_stream(exchange, dialect, call, disconnect)
        else:
            is_delivered = await _deliver_whole(exchange, dialect, call, disconnect)
    finally:
        call.leave()
    if is_delivered:
        await call.mark_delivered()
    elif not call.listeners:
        await call.mark_undelivered()


async def _deliver_whole(
    exchange: Exchange, dialect: Dialect, call: LlmCall, disconnect: "asyncio.Task[None]"
) -> bool:
    await call.wait(disconnect)
    if disconnect.done():
        return False
    return await exchange.deliver(200, dialect.answer(call.request, call_result(call)))


async def _deliver_stream(
    exchange: Exchange, dialect: Dialect, call: LlmCall, disconnect: "asyncio.Task[None]"
) -> bool:
    """Sends nothing before the first delta, so that an early failure still has its HTTP status."""
    writer = dialect.writer(call.request, call.step_id, call.created, call.served_model())
    async for delta in call.follow(disconnect):
        if exchange.status is None:
            await exchange.begin_events()
            await exchange.write(writer.begin())
        await exchange.write(writer.delta(delta))
    if disconnect.done():
        return False
    try:
        answer = call_result(call)
    except ApiError as error:
        if exchange.status is None:
            raise
        await exchange.finish(writer.error(str(error), error.kind))
        return False
    if exchange.status is None:
        await exchange.begin_events()
        await exchange.write(writer.begin())
    return await exchange.finish(writer.end(answer))


def call_result(call: LlmCall) -> Answer:
    """The answer of a call that is done; raises its error."""
    if call.task.cancelled():
        raise Unavailable("The call was cancelled because the gateway is shutting down. Retry it.")
    return call.task.result()


async def deliver_recorded(
    exchange: Exchange,
    dialect: Dialect,
    context: CallContext,
    request: Request,
    recorded: RecordedStep,
    prompt: bytes,
) -> None:
    """Responds to a retry with the Step that its first attempt left in the log."""
    metrics.retries_served.labels("rebuilt").inc()
    exchange.watch_disconnect()
    answer = await rebuild_answer(context.generator, request, recorded, prompt)
    is_delivered = await send_answer(exchange, dialect, request, answer)
    if is_delivered and not recorded.delivered:
        recorded.delivered = True
        await context.log.write(delivery_note(recorded.step, delivered=True))


async def send_answer(
    exchange: Exchange, dialect: Dialect, request: Request, answer: Answer
) -> bool:
    """Sends an answer that is complete, as a stream if the client asked for one. Returns whether the
    client was connected until all of it was sent."""
    if not request.stream:
        return await exchange.deliver(200, dialect.answer(request, answer))
    writer = dialect.writer(request, answer.step_id, answer.created, answer.model)
    await exchange.begin_events()
    return await exchange.finish(
        writer.begin() + writer.delta(as_delta(answer)) + writer.end(answer)
    )
