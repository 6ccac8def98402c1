"""What is said in a trajectory, overheard on its way between OpenAI's client and the server.

It is for pages, tables and statistics. What is trained is what the gateway records: token ids and
logprobs, which never come through here.
"""

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from steplog.environment.hearing import events, heard, is_heard

Json = dict[str, Any]
ODD = (ValueError, LookupError, TypeError, AttributeError, StopIteration)
"""What an answer of another shape than OpenAI's raises when it is read."""


@dataclass(frozen=True)
class Call:
    """One call that was answered."""

    messages: Sequence[Json]
    answer: Json
    """The message that came back."""
    finish_reason: str | None
    tokens: int
    """As many as the server says that it generated."""
    seconds: float


class Recorder(httpx2.AsyncBaseTransport):
    """Tells `heard` of every call, and `trouble` why one is not answered, which OpenAI's client keeps
    to itself while it repeats it. The connections belong to `inner`, which many of these share."""

    def __init__(
        self,
        inner: httpx2.AsyncBaseTransport,
        heard: Callable[[Call], None],
        trouble: Callable[[str], object],
    ) -> None:
        self._inner = inner
        self._heard = heard
        self._trouble = trouble

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        began = time.monotonic()
        try:
            response = await self._inner.handle_async_request(request)
        except httpx2.TransportError as error:
            self._trouble(no_answer(error))
            raise
        self._trouble(f"status {response.status_code}" if is_outage(response) else "")
        if response.status_code == 409:
            # A trajectory that is closed stays closed; OpenAI's client would ask again for minutes.
            response.headers["x-should-retry"] = "false"
        if response.status_code == 200 and is_heard(request.url.path):
            assert isinstance(response.stream, httpx2.AsyncByteStream)

            def hear(body: bytes) -> None:
                call = _read(request, response.headers, body, time.monotonic() - began)
                if call is not None:
                    self._heard(call)

            response.stream = _Overheard(response.stream, hear)
        return response

    async def aclose(self) -> None:
        pass


def no_answer(error: httpx2.TransportError) -> str:
    return f"no answer ({str(error) or type(error).__name__})"


def is_outage(response: httpx2.Response) -> bool:
    """OpenAI's client asks again."""
    return response.status_code == 429 or response.status_code >= 500


class _Overheard(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, hear: Callable[[bytes], None]) -> None:
        self._inner = inner
        self._hear = hear
        self._parts: list[bytes] = []

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            self._parts.append(part)
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()
        body, self._parts = b"".join(self._parts), []
        if body:
            self._hear(body)


def _read(
    request: httpx2.Request, headers: httpx2.Headers, body: bytes, seconds: float
) -> Call | None:
    """None: an odd answer is for the author's code to stumble over, not for ours."""
    try:
        text = httpx2.Response(200, headers=headers, content=body).text
        is_stream = "text/event-stream" in headers.get("content-type", "")
        stream = events(text) if is_stream else None
        told = None if is_stream else json.loads(text)
        return Call(
            *heard(request.url.path, json.loads(request.content), stream, told), seconds=seconds
        )
    except ODD:
        return None


def conversations(calls: Sequence[Call]) -> list[list[Json]]:
    """The messages of the calls, without those that a later call only continues."""
    last: list[Call] = []
    for call in calls:
        if last and _continues(call.messages, last[-1].messages):
            last.pop()
        last.append(call)
    return [[*call.messages, call.answer] for call in last]


def _continues(messages: Sequence[Json], earlier: Sequence[Json]) -> bool:
    """The same question once more is another conversation: its answers are not in one another."""
    before = len(earlier)
    return len(messages) > before and list(messages[:before]) == list(earlier)
