"""One vLLM server: calls to it, and what is known of its state."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from gateway.engines import wire
from gateway.engines.wire import Malformed, Parsed
from gateway.errors import ApiError, BadRequest, TooLarge
from pool.core.versions import Version
from servicekit.masking import LOGIN

JSON = {"content-type": "application/json"}
DONE = b"[DONE]"
LOOK_TIMEOUT = aiohttp.ClientTimeout(total=5)
TROUBLES = (aiohttp.ClientError, asyncio.TimeoutError, msgspec.DecodeError, Malformed, OSError)
"""What a broken engine or network shows as. Time-outs, cut connections and nonsense alike."""
TOO_LONG = ("maximum model length", "maximum context length")
"""How vLLM says that a prompt does not fit, with and without max_tokens."""


class EngineTrouble(Exception):
    """The engine failed, not the request: another engine may do it. `words` are the engine's; they may
    quote a prompt, so the client hears them and the log does not."""

    def __init__(self, sentence: str, words: str = "") -> None:
        super().__init__(f"{sentence}: {words}" if words else sentence)
        self.sentence = sentence


class Engine:
    """`running` is the number of our requests that it works on."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self.name = LOGIN.sub("***", self.url)
        """For others to see."""
        self.running = 0
        self.healthy = False
        self.version: Version | None = None
        self.models: list[str] = []
        self.paused_since: float | None = None
        self._session = session

    async def generate(self, body: bytes, alternatives: bool) -> wire.AnyChoice:
        """The whole answer at once."""
        answer = await self._post("/inference/v1/generate", body)
        decode = wire.generated_with_alternatives if alternatives else wire.generated
        choice: wire.AnyChoice = _only_choice(decode(answer))
        return choice

    async def stream(self, body: bytes, alternatives: bool) -> AsyncIterator[wire.AnyChoice]:
        """The answer's chunks, as they come."""
        decode = wire.generated_with_alternatives if alternatives else wire.generated
        async with self._session.post(
            self.url + "/inference/v1/generate", data=body, headers=JSON
        ) as response:
            if response.status != 200:
                raise _refusal(response.status, await response.read())
            async for data in _events(response.content):
                if data == DONE:
                    return
                chunk = decode(data)
                if chunk.error is not None:
                    # The status was sent before the engine looked: 4xx comes as an event too.
                    code = chunk.error.code
                    raise _refusal(code if isinstance(code, int) else 500, data)
                for choice in chunk.choices:
                    yield choice
        raise EngineTrouble("the engine's stream broke off")

    async def prompt_logprobs(self, body: bytes) -> list[dict[str, float] | None]:
        told = wire.asked_prompt(await self._post("/inference/v1/generate", body)).prompt_logprobs
        if told is None:
            raise Malformed("the engine told no logprobs of the prompt")
        return [
            None if at is None else {id_: one.logprob for id_, one in at.items()} for at in told
        ]

    async def parse(self, ids: Sequence[int], chat: Mapping[str, Any]) -> Parsed:
        """Text, reasoning and tool calls of an answer, by the engine's own parsers."""
        choice = {"index": 0, "finish_reason": "stop", "token_ids": ids}
        body = {"generate_response": {"choices": [choice]}, "chat_request": chat}
        answer = await self._post("/v1/chat/completions/derender", msgspec.json.encode(body))
        message: Parsed = _only_choice(wire.derendered(answer)).message
        return message

    async def parse_chunk(
        self,
        ids: Sequence[int],
        prompt: Sequence[int],
        chat: Mapping[str, Any],
        state: msgspec.Raw | None,
        last: bool,
    ) -> tuple[Parsed, msgspec.Raw]:
        """The same for a part of an answer; `state` goes from one part to the next."""
        choice = {"index": 0, "finish_reason": "stop" if last else None, "token_ids": ids}
        body = {
            "stream": True,
            "generate_chunk": {"choices": [choice]},
            "prompt_token_ids": prompt,
            "chat_request": chat,
            "stream_state": state,
        }
        answer = await self._post("/v1/chat/completions/derender", msgspec.json.encode(body))
        part = wire.derendered_chunk(answer)
        delta = part.chunk.choices[0].delta if part.chunk.choices else Parsed()
        return delta, part.stream_state

    async def tool_grammar(self, chat: Mapping[str, Any]) -> dict[str, Any] | None:
        """What holds the model to calling a tool; it depends on the engine's parser."""
        answer = await self._post("/v1/chat/completions/render", msgspec.json.encode(chat))
        return wire.rendered(answer).sampling_params.structured_outputs

    async def look(self) -> None:
        """Asks how it is; raises one of TROUBLES when it is not well."""
        await self._get("/health")
        if not self.healthy:
            models = wire.model_list(await self._get("/v1/models"))
            self.models = [card.id for card in models.data]
        await self._look_at_weights()

    async def _look_at_weights(self) -> None:
        """Only servers in development mode tell, and only those can be given weights."""
        try:
            told = wire.weight_info(await self._get("/weight_info"))
            paused = b"true" in await self._get("/is_paused")
        except aiohttp.ClientResponseError:
            self.version, self.paused_since = None, None
            return
        self.version = Version.parse(told.weight_version)
        now = asyncio.get_running_loop().time()
        self.paused_since = (self.paused_since or now) if paused else None

    async def _get(self, path: str) -> bytes:
        async with self._session.get(
            self.url + path, timeout=LOOK_TIMEOUT, raise_for_status=True
        ) as response:
            return await response.read()

    async def _post(self, path: str, body: bytes) -> bytes:
        async with self._session.post(self.url + path, data=body, headers=JSON) as response:
            answer = await response.read()
            if response.status != 200:
                raise _refusal(response.status, answer)
            return answer


def _only_choice(answer: Any) -> Any:
    if len(answer.choices) != 1:
        raise Malformed(f"the engine gave {len(answer.choices)} choices, 1 was asked for")
    return answer.choices[0]


def _refusal(status: int, body: bytes) -> ApiError | EngineTrouble:
    """A 4xx is about the request, so it is the client's; anything else is the engine's."""
    try:
        told = wire.error_body(body).error
    except msgspec.DecodeError:
        told = None
    message = told.message if told and told.message else body[:200].decode("utf-8", "replace")
    if status == 413:
        return TooLarge(f"the engine refused the request: {message}")
    if status in (400, 422):
        too_long = any(words in message for words in TOO_LONG)
        code = "context_length_exceeded" if too_long else None
        return BadRequest(f"the engine refused the request: {message}", code=code)
    return EngineTrouble(f"the engine answered {status}", message)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events."""
    rest = b""
    async for block in content.iter_any():
        *events, rest = (rest + block).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event[6:]
