"""Calls that name no trajectory: environments of other frameworks know one URL only.

Each sample becomes a trajectory of one Step, closed as soon as it is answered, so that nothing waits
for it. Its prompt_uid is made from the request: samples of equal requests stand together in the log.
They have a channel of their own, since nobody scored them: what is trained comes with its scores, by
another way.
"""

import asyncio
import hashlib
import uuid
from collections.abc import Sequence

import msgspec

from gateway.calls.call import Call, Recorder
from gateway.calls.delivery import deliver
from gateway.dialects.request import Dialect, Request
from gateway.errors import BadRequest, Unavailable
from gateway.http.exchange import Exchange
from gateway.state.trajectories import Completion
from schemas import Step

MAX_SAMPLES = 128
ANSWERED = Completion()
LEFT = Completion(status="cancelled", reason="its client went away")


class Unbound:
    def __init__(self, recorder: Recorder, channel: str) -> None:
        self._recorder = recorder
        self._channel = channel

    async def answer(
        self, exchange: Exchange, dialect: Dialect, body: bytes, tenant: str, scope: str
    ) -> None:
        """One or several samples in the client's dialect. Several are put into one answer, as the
        choices of an API that has them."""
        body, count = _without_n(body)
        request = dialect.parse(body)
        if count == 1:
            (call,) = await self._begin([request], body, tenant, scope)
            try:
                await deliver(exchange, dialect, call)
            finally:
                await self._close(call)
            return
        if request.stream:
            raise BadRequest("a stream has one sample: leave n out", param="n")
        calls = await self._begin([request] * count, body, tenant, scope)
        await self._wait(exchange, calls)
        answers = [dialect.answer(request, call.task.result()) for call in calls]
        await exchange.reply(200, _merged(answers))

    async def sample(
        self, exchange: Exchange, request: Request, count: int, body: bytes, tenant: str, scope: str
    ) -> list[Step]:
        """The Steps that a request gives, for routes of token ids."""
        calls = await self._begin([request] * count, body, tenant, scope)
        await self._wait(exchange, calls)
        return [call.written.step for call in calls if call.written is not None]

    async def _begin(
        self, requests: Sequence[Request], body: bytes, tenant: str, scope: str
    ) -> list[Call]:
        digest = hashlib.blake2b(body, digest_size=12).digest()
        prompt_uid = f"{scope}{digest.hex()}"
        calls = []
        for request in requests:
            trajectory = await self._recorder.trajectories.for_call(
                uuid.uuid4().hex, prompt_uid, tenant, self._channel
            )
            calls.append(Call(self._recorder, trajectory, request, digest, len(body)).start())
        return calls

    async def _wait(self, exchange: Exchange, calls: Sequence[Call]) -> None:
        """Until all have ended. Samples of a client that goes away are kept: they cost the engines
        as much, and are in the log."""
        gone = exchange.watch()
        for call in calls:
            call.join()
        try:
            for call in calls:
                await call.ended(gone)
        finally:
            for call in calls:
                call.leave()
            await asyncio.gather(*(self._close(call) for call in calls))
        if not exchange.stop_watching():
            raise ConnectionResetError("the client went away")
        for call in calls:
            if call.task.cancelled():
                raise Unavailable("the call was cancelled while the gateway shuts down; try again")
            call.task.result()

    async def _close(self, call: Call) -> None:
        if call.trajectory.registered:
            ended = call.task.done() and not call.task.cancelled()
            about = ANSWERED if ended and call.task.exception() is None else LEFT
            await self._recorder.trajectories.complete(call.trajectory, about)


def _without_n(body: bytes) -> tuple[bytes, int]:
    """The request of one sample, and how many are wanted."""
    try:
        asked = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body, 1  # the dialect has the words for it
    if not isinstance(asked, dict) or asked.get("n") in (None, 1):
        return body, 1
    return msgspec.json.encode({k: v for k, v in asked.items() if k != "n"}), samples(asked["n"])


def samples(n: object) -> int:
    if not isinstance(n, int) or not 1 <= n <= MAX_SAMPLES:
        raise BadRequest(f"n must be a number from 1 to {MAX_SAMPLES}", param="n")
    return n


def _merged(answers: Sequence[bytes]) -> bytes:
    first, *others = [msgspec.json.decode(answer) for answer in answers]
    if "choices" not in first:
        raise BadRequest("this route gives one sample: leave n out", param="n")
    for place, other in enumerate(others, 1):
        first["choices"] += [choice | {"index": place} for choice in other["choices"]]
        first["usage"]["completion_tokens"] += other["usage"]["completion_tokens"]
        first["usage"]["total_tokens"] += other["usage"]["completion_tokens"]
    return msgspec.json.encode(first)
