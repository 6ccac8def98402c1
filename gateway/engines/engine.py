"""One vLLM server: requests to it, and its last known state."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from gateway.engines import wire
from gateway.engines.wire import MalformedAnswer, ParsedMessage
from gateway.errors import CONTEXT_OVERFLOW, ApiError, BadRequest, TooLarge
from pool.core.versions import Version
from servicekit.masking import LOGIN

JSON = {"content-type": "application/json"}
DONE = b"[DONE]"
POLL_TIMEOUT = aiohttp.ClientTimeout(total=5)
ENGINE_ERRORS = (
    aiohttp.ClientError,
    asyncio.TimeoutError,
    msgspec.DecodeError,
    MalformedAnswer,
    OSError,
)
"""How a broken engine or network shows: timeouts, closed connections, malformed answers."""
TOO_LONG = ("maximum model length", "maximum context length")
"""How vLLM's message says that a prompt does not fit, with and without max_tokens."""


class EngineError(Exception):
    """The engine failed, not the request: another engine may serve it. `details` is the engine's own
    message; it may quote a prompt, so it goes to the client and not to our log."""

    def __init__(self, summary: str, details: str = "") -> None:
        super().__init__(f"{summary}: {details}" if details else summary)
        self.summary = summary


class Engine:
    """A client of one vLLM server. `running` counts our requests in progress there."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self.name = LOGIN.sub("***", self.url)
        """The URL without a login, for logs and traces."""
        self.running = 0
        self.last_choice = 0
        """The number of the router's choice that last fell on this engine; 0 if none did."""
        self.healthy = False
        self.version: Version | None = None
        self.models: list[str] = []
        self.paused_since: float | None = None
        self._session = session

    async def generate(self, body: bytes, alternatives: bool) -> wire.AnyChoice:
        """Generates a complete answer."""
        answer = await self._post("/inference/v1/generate", body)
        decode = wire.generated_with_alternatives if alternatives else wire.generated
        choice: wire.AnyChoice = _only_choice(decode(answer))
        return choice

    async def stream(self, body: bytes, alternatives: bool) -> AsyncIterator[wire.AnyChoice]:
        """Generates an answer; yields its chunks as they arrive."""
        decode = wire.generated_with_alternatives if alternatives else wire.generated
        async with self._session.post(
            self.url + "/inference/v1/generate", data=body, headers=JSON
        ) as response:
            if response.status != 200:
                raise _error(response.status, await response.read())
            async for data in _events(response.content):
                if data == DONE:
                    return
                chunk = decode(data)
                if chunk.error is not None:
                    # vLLM sends status 200 before it validates, so a 4xx may come as an event.
                    code = chunk.error.code
                    raise _error(code if isinstance(code, int) else 500, data)
                for choice in chunk.choices:
                    yield choice
        raise EngineError("the engine's stream ended without [DONE]")

    async def prompt_logprobs(self, body: bytes) -> list[dict[str, float] | None]:
        """Logprobs of a prompt's ids and their alternatives, by id; None for the first."""
        answer = await self._post("/inference/v1/generate", body)
        positions = wire.prompt_logprobs_answer(answer).prompt_logprobs
        if positions is None:
            raise MalformedAnswer("the engine returned no prompt_logprobs")
        return [
            None if entries is None else {id_: entry.logprob for id_, entry in entries.items()}
            for entries in positions
        ]

    async def parse(self, ids: Sequence[int], chat: Mapping[str, Any]) -> ParsedMessage:
        """Parses an answer into text, reasoning and tool calls with the engine's own parsers."""
        choice = {"index": 0, "finish_reason": "stop", "token_ids": ids}
        body = {"generate_response": {"choices": [choice]}, "chat_request": chat}
        answer = await self._post("/v1/chat/completions/derender", msgspec.json.encode(body))
        message: ParsedMessage = _only_choice(wire.derendered(answer)).message
        return message

    async def parse_chunk(
        self,
        ids: Sequence[int],
        context: Sequence[int],
        chat: Mapping[str, Any],
        state: msgspec.Raw | None,
        last: bool,
    ) -> tuple[ParsedMessage, msgspec.Raw]:
        """The same for a part of an answer; `state` is passed from one part to the next. `context` are
        the ids before the answer that the parser needs (`gateway.tokens.parser_context`)."""
        choice = {"index": 0, "finish_reason": "stop" if last else None, "token_ids": ids}
        body = {
            "stream": True,
            "generate_chunk": {"choices": [choice]},
            "prompt_token_ids": context,
            "chat_request": chat,
            "stream_state": state,
        }
        answer = await self._post("/v1/chat/completions/derender", msgspec.json.encode(body))
        part = wire.derendered_chunk(answer)
        delta = part.chunk.choices[0].delta if part.chunk.choices else ParsedMessage()
        return delta, part.stream_state

    async def tool_grammar(self, chat: Mapping[str, Any]) -> dict[str, Any] | None:
        """The structured output that forces a tool call; it depends on the engine's parser."""
        answer = await self._post("/v1/chat/completions/render", msgspec.json.encode(chat))
        return wire.rendered(answer).sampling_params.structured_outputs

    async def poll(self) -> None:
        """Updates the state; raises one of ENGINE_ERRORS if the engine is unhealthy."""
        await self._get("/health")
        if not self.healthy:
            models = wire.model_list(await self._get("/v1/models"))
            self.models = [card.id for card in models.data]
        await self._poll_weights()

    async def _poll_weights(self) -> None:
        """Only servers in development mode have these routes, and only they can receive weights."""
        try:
            info = wire.weight_info(await self._get("/weight_info"))
            paused = b"true" in await self._get("/is_paused")
        except aiohttp.ClientResponseError:
            self.version, self.paused_since = None, None
            return
        self.version = Version.parse(info.weight_version)
        now = asyncio.get_running_loop().time()
        self.paused_since = (self.paused_since or now) if paused else None

    async def _get(self, path: str) -> bytes:
        async with self._session.get(
            self.url + path, timeout=POLL_TIMEOUT, raise_for_status=True
        ) as response:
            return await response.read()

    async def _post(self, path: str, body: bytes) -> bytes:
        async with self._session.post(self.url + path, data=body, headers=JSON) as response:
            answer = await response.read()
            if response.status != 200:
                raise _error(response.status, answer)
            return answer


def _only_choice(answer: Any) -> Any:
    if len(answer.choices) != 1:
        raise MalformedAnswer(f"the engine returned {len(answer.choices)} choices instead of 1")
    return answer.choices[0]


def _error(status: int, body: bytes) -> ApiError | EngineError:
    """The error of an answer that is not 200: a 4xx is the client's mistake, anything else the
    engine's."""
    try:
        error = wire.error_body(body).error
    except msgspec.DecodeError:
        error = None
    message = error.message if error and error.message else body[:200].decode("utf-8", "replace")
    if status == 413:
        return TooLarge(f"The engine rejected the request as too large: {message}")
    if status in (400, 422):
        is_too_long = any(phrase in message for phrase in TOO_LONG)
        code = CONTEXT_OVERFLOW if is_too_long else None
        return BadRequest(f"The engine rejected the request: {message}", code=code)
    return EngineError(f"the engine responded with HTTP {status}", message)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data fields of server-sent events."""
    rest = b""
    async for block in content.iter_any():
        *events, rest = (rest + block).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event[6:]
