"""Records the calls of a trajectory as they pass between OpenAI's client and the server.

The recording is for pages, tables and statistics. Training uses what the gateway records: token ids and
logprobs, which never pass through here.
"""

import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx2

from steplog.environment.backends.transcript import (
    is_transcribed,
    parse_events,
    transcribe,
)

log = logging.getLogger(__name__)

Json = dict[str, Any]
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, StopIteration)
"""Raised while reading an answer that does not have OpenAI's shape."""
REFUSALS = (400, 413)
"""The statuses of a call that is too long, among others."""
OVERFLOW_CODE = "context_length_exceeded"
OVERFLOW_WORDS = "maximum context length"


@dataclass(frozen=True)
class Call:
    """One answered call."""

    messages: Sequence[Json]
    answer: Json
    """The message that came back."""
    finish_reason: str | None
    tokens: int
    """Generated tokens, as the server counts them; 0 if it does not say."""
    seconds: float
    prompt_tokens: int = 0
    answer_id: str = ""
    versions: tuple[str, ...] = ()
    """The versions of the weights that answered; empty if the server does not say."""


@dataclass
class Recording:
    """The calls of one trajectory, and what became of the last one."""

    calls: list[Call] = field(default_factory=list)
    """Those that were answered."""
    overflowed: bool = False
    """The last call did not fit into the model's context."""
    outage: str = ""
    """Why the last call is being retried; OpenAI's client does that silently."""

    def add(self, call: Call) -> None:
        self.calls.append(call)
        self.overflowed = False


class Recorder(httpx2.AsyncBaseTransport):
    """Records the calls of one trajectory. `on_outage` gets the reason whenever a call is not answered,
    and an empty one when it is. The connections belong to `inner`, which many recorders share."""

    def __init__(
        self,
        inner: httpx2.AsyncBaseTransport,
        recording: Recording,
        on_outage: Callable[[str], object],
    ) -> None:
        self._inner = inner
        self._recording = recording
        self._on_outage = on_outage

    def _note_outage(self, reason: str) -> None:
        self._recording.outage = reason
        self._on_outage(reason)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        began = time.monotonic()
        try:
            response = await self._inner.handle_async_request(request)
        except httpx2.TransportError as error:
            self._note_outage(describe_transport_error(error))
            raise
        self._note_outage(f"status {response.status_code}" if is_outage(response) else "")
        if response.status_code == 409:
            # A closed trajectory stays closed; OpenAI's client would retry for minutes.
            response.headers["x-should-retry"] = "false"
        if not is_transcribed(request.url.path):
            return response

        def record(body: bytes) -> None:
            call = _read_call(request, response.headers, body, time.monotonic() - began)
            if call is not None:
                self._recording.add(call)

        def record_refusal(body: bytes) -> None:
            self._recording.overflowed = _is_overflow(response.headers, body)

        if response.status_code == 200:
            _copy_body(response, record)
        elif response.status_code in REFUSALS:
            _copy_body(response, record_refusal)
        return response

    async def aclose(self) -> None:
        pass


def describe_transport_error(error: httpx2.TransportError) -> str:
    return f"no answer ({str(error) or type(error).__name__})"


def is_outage(response: httpx2.Response) -> bool:
    """Whether OpenAI's client retries after this response."""
    return response.status_code == 429 or response.status_code >= 500


def _copy_body(response: httpx2.Response, on_end: Callable[[bytes], None]) -> None:
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = _CopiedStream(response.stream, on_end)


class _CopiedStream(httpx2.AsyncByteStream):
    """A response body that is passed on as it arrives, and as a whole to `on_end`."""

    def __init__(self, inner: httpx2.AsyncByteStream, on_end: Callable[[bytes], None]) -> None:
        self._inner = inner
        self._on_end = on_end
        self._parts: list[bytes] = []

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            self._parts.append(part)
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()
        body, self._parts = b"".join(self._parts), []
        if body:
            self._on_end(body)


def _is_overflow(headers: httpx2.Headers, body: bytes) -> bool:
    """Whether a refusal says that the prompt does not fit into the model's context. A gateway and
    OpenAI have a code for that, vLLM has words."""
    try:
        error = json.loads(httpx2.Response(400, headers=headers, content=body).text)["error"]
        return error["code"] == OVERFLOW_CODE or OVERFLOW_WORDS in error["message"]
    except MALFORMED:
        return False


def _read_call(
    request: httpx2.Request, headers: httpx2.Headers, body: bytes, seconds: float
) -> Call | None:
    """None if the answer is malformed: the author's code will meet that, ours must not fail on it."""
    try:
        text = httpx2.Response(200, headers=headers, content=body).text
        is_stream = "text/event-stream" in headers.get("content-type", "")
        answer = parse_events(text) if is_stream else json.loads(text)
        transcript = transcribe(request.url.path, json.loads(request.content), answer)
    except MALFORMED:
        return None
    if is_stream and not transcript.tokens:
        _warn_about_missing_counts()
    return Call(**transcript._asdict(), seconds=seconds)


@cache
def _warn_about_missing_counts() -> None:
    log.warning(
        "A streamed answer came without token counts, so rollout.tokens and --max-token-length do not "
        'include it. Call with stream_options={"include_usage": True} to get them.'
    )


def conversations(calls: Sequence[Call]) -> list[list[Json]]:
    """The messages of the calls; a call that a later one continues is not listed separately."""
    last_calls: list[Call] = []
    for call in calls:
        if last_calls and _continues(call.messages, last_calls[-1].messages):
            last_calls.pop()
        last_calls.append(call)
    return [[*call.messages, call.answer] for call in last_calls]


def _continues(messages: Sequence[Json], earlier: Sequence[Json]) -> bool:
    """Asking the same again starts another conversation: neither answer is part of the other call."""
    count = len(earlier)
    return len(messages) > count and list(messages[:count]) == list(earlier)
