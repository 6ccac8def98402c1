"""Calls that name no trajectory: environments of other frameworks only know one URL.

Each sample becomes a trajectory of one Step, which is closed as soon as it is answered, so that nothing
waits for it. Its prompt_uid is made from the request: samples of equal requests share it. They go to a
channel of their own, because they have no rewards: scored groups reach the trainer by another way.
"""

import asyncio
import hashlib
import uuid
from collections.abc import Sequence

import msgspec

from gateway.calls.call import CallContext, LlmCall
from gateway.calls.delivery import call_result, deliver
from gateway.dialects.request import Dialect, Request
from gateway.dialects.sampling import check_sample_count
from gateway.errors import BadRequest
from gateway.http.exchange import Exchange
from gateway.state.completion import Completion
from gateway.state.conversation import HashChain
from schemas import Step

ANSWERED = Completion()
ABANDONED = Completion(status="cancelled", reason="its client disconnected")


class UnboundCalls:
    """Serves calls without a trajectory; records them in `channel`."""

    def __init__(self, context: CallContext, channel: str) -> None:
        self._context = context
        self._channel = channel

    async def serve(
        self, exchange: Exchange, dialect: Dialect, body: bytes, tenant: str, scope: str
    ) -> None:
        """Responds in the client's dialect. Several samples are merged into one answer, as its
        choices."""
        body, count = _split_sample_count(body)
        request = dialect.parse(body)
        if count == 1:
            (call,) = await self._start([request], body, tenant, scope)
            try:
                await deliver(exchange, dialect, call)
            finally:
                await self._close(call)
            return
        if request.stream:
            raise BadRequest(
                "A stream has one sample. Leave n out, or set stream to false.", param="n"
            )
        calls = await self._start([request] * count, body, tenant, scope)
        await self._wait(exchange, calls)
        answers = [dialect.answer(request, call.task.result()) for call in calls]
        await exchange.reply(200, _merge_answers(answers))

    async def sample(
        self, exchange: Exchange, request: Request, count: int, body: bytes, tenant: str, scope: str
    ) -> list[Step]:
        """Generates `count` samples and returns their Steps, for routes that work with token ids."""
        calls = await self._start([request] * count, body, tenant, scope)
        await self._wait(exchange, calls)
        return [call.recorded.step for call in calls if call.recorded is not None]

    async def _start(
        self, requests: Sequence[Request], body: bytes, tenant: str, scope: str
    ) -> list[LlmCall]:
        digest = hashlib.blake2b(body, digest_size=12).digest()
        prompt_uid, chain = f"{scope}{digest.hex()}", HashChain(requests[0])
        calls = []
        for request in requests:
            trajectory = await self._context.trajectories.for_call(
                uuid.uuid4().hex, prompt_uid, tenant, self._channel
            )
            call = LlmCall(self._context, trajectory, request, chain, digest, len(body))
            calls.append(call.start())
        return calls

    async def _wait(self, exchange: Exchange, calls: Sequence[LlmCall]) -> None:
        """Waits until all calls are done. Samples of a client that disconnects are kept: the engines
        have done the work, and they are in the log."""
        disconnect = exchange.watch_disconnect()
        for call in calls:
            call.join()
        try:
            for call in calls:
                await call.wait(disconnect)
        finally:
            for call in calls:
                call.leave()
            await asyncio.gather(*(self._close(call) for call in calls))
        if not exchange.stop_watching():
            raise ConnectionResetError("the client disconnected")
        for call in calls:
            call_result(call)

    async def _close(self, call: LlmCall) -> None:
        if call.trajectory.registered:
            is_done = call.task.done() and not call.task.cancelled()
            is_answered = is_done and call.task.exception() is None
            completion = ANSWERED if is_answered else ABANDONED
            await self._context.trajectories.complete(call.trajectory, completion)


def _split_sample_count(body: bytes) -> tuple[bytes, int]:
    """The body without `n`, and `n`."""
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body, 1  # the dialect refuses it with a better message
    if not isinstance(fields, dict) or fields.get("n") in (None, 1):
        return body, 1
    count = check_sample_count(fields.pop("n"))
    return msgspec.json.encode(fields), count


def _merge_answers(answers: Sequence[bytes]) -> bytes:
    first, *others = [msgspec.json.decode(answer) for answer in answers]
    if "choices" not in first:
        raise BadRequest("This route returns one sample per request. Leave n out.", param="n")
    fingerprints = [answer["system_fingerprint"] for answer in (first, *others)]
    first["system_fingerprint"] = ",".join(dict.fromkeys(",".join(fingerprints).split(",")))
    for index, other in enumerate(others, 1):
        first["choices"] += [choice | {"index": index} for choice in other["choices"]]
        first["usage"]["completion_tokens"] += other["usage"]["completion_tokens"]
        first["usage"]["total_tokens"] += other["usage"]["completion_tokens"]
    return msgspec.json.encode(first)
