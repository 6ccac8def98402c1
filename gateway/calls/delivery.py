"""From a call to its client: at once or as a stream, to the first client or to a retry.

The last thing that a client is told comes after the Step is durable. A client that went away before
it heard that leaves a note on the Step; a retry that is served later takes it back.
"""

import asyncio

from gateway import metrics
from gateway.calls.answers import answer_again, as_delta
from gateway.calls.call import Call, Recorder, note
from gateway.dialects.request import Answer, Dialect, Request
from gateway.errors import ApiError, Unavailable
from gateway.http.exchange import Exchange
from gateway.state.trajectory import Written


async def deliver(exchange: Exchange, dialect: Dialect, call: Call) -> None:
    """Answers with a call that runs. If the client goes away, the call stays for a while."""
    call.join()
    gone = exchange.watch()
    try:
        if call.request.stream:
            reached = await _stream(exchange, dialect, call, gone)
        else:
            reached = await _at_once(exchange, dialect, call, gone)
    finally:
        call.leave()
    if reached:
        await call.mark_delivered()
    elif not call.listeners:
        await call.mark_undelivered()


async def _at_once(
    exchange: Exchange, dialect: Dialect, call: Call, gone: "asyncio.Task[None]"
) -> bool:
    await call.ended(gone)
    if not exchange.stop_watching():
        return False
    answer = _result(call)
    await exchange.reply(200, dialect.answer(call.request, answer))
    return True


async def _stream(
    exchange: Exchange, dialect: Dialect, call: Call, gone: "asyncio.Task[None]"
) -> bool:
    """Nothing is sent before the first part is there, so that an early failure has its status."""
    writer = dialect.writer(call.request, call.step_id, call.created, call.served_model())
    async for delta in call.follow(gone):
        if exchange.status is None:
            await exchange.begin_events()
            await exchange.write(writer.begin())
        await exchange.write(writer.delta(delta))
    if not exchange.stop_watching():
        return False
    try:
        answer = _result(call)
    except ApiError as error:
        if exchange.status is None:
            raise
        await exchange.write(writer.error(str(error), error.kind))
    else:
        if exchange.status is None:
            await exchange.begin_events()
            await exchange.write(writer.begin())
        await exchange.write(writer.end(answer))
    await exchange.end()
    return True


def _result(call: Call) -> Answer:
    if call.task.cancelled():
        raise Unavailable("the call was cancelled while the gateway shuts down; try again")
    return call.task.result()


async def deliver_again(
    exchange: Exchange,
    dialect: Dialect,
    recorder: Recorder,
    request: Request,
    written: Written,
    prompt: bytes,
) -> None:
    """Answers a retry with the Step that its first attempt left in the log."""
    metrics.retries_served.labels("rebuilt").inc()
    again = await answer_again(recorder.generator, request, written, prompt)
    await send_whole(exchange, dialect, request, again)
    if not written.delivered:
        written.delivered = True
        await recorder.log.write(note(written.step, delivered=True))


async def send_whole(
    exchange: Exchange, dialect: Dialect, request: Request, answer: Answer
) -> None:
    """An answer that is there already, streamed if the client wants it so."""
    if not request.stream:
        await exchange.reply(200, dialect.answer(request, answer))
        return
    writer = dialect.writer(request, answer.step_id, answer.created, answer.model)
    await exchange.begin_events()
    await exchange.write(writer.begin() + writer.delta(as_delta(answer)) + writer.end(answer))
    await exchange.end()
