"""What sampled ids say: text, or what the engine's parsers find in it.

Without tools the text is the answer, and reading is decoding. With tools the engine's own parsers
read the ids (`derender`), since every model family writes its calls in its own way; an engine that
runs no parser gives the raw text back, which is what agents with parsers of their own expect.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from gateway.dialects.request import Delta, Request, TokenLogprob, ToolCall, ToolCallDelta
from gateway.engines.engine import Engine
from gateway.engines.wire import Parsed, Sample
from gateway.tokens.renderer import Renderer

Emit = Callable[[Delta], None]


class Told(msgspec.Struct):
    """What an answer says to its client."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    stop_sequence: str | None = None

    def add(self, delta: Delta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        for part in delta.tool_calls:
            while len(self.tool_calls) <= part.index:
                self.tool_calls.append(ToolCall(id="", name="", arguments=""))
            call = self.tool_calls[part.index]
            call.id = call.id or part.id or ""
            call.name = call.name or part.name or ""
            call.arguments += part.arguments


async def read(
    renderer: Renderer, parser: Engine | None, request: Request, ids: Sequence[int]
) -> Told:
    """A whole answer."""
    text, stop = renderer.text(ids, request.sampling)
    if parser is None:
        return Told(text, stop_sequence=stop)
    spoken = renderer.without_end(ids, text, request.sampling, stop is not None)
    if not spoken:
        return Told(stop_sequence=stop)
    told = Told(stop_sequence=stop)
    told.add(_delta(await parser.parse(spoken, chat_request(request)), numbered=True))
    return told


class Reading(Protocol):
    """A streamed answer. `feed` comes after each chunk, with all that was sampled so far."""

    told: Told

    def feed(self, sample: Sample) -> None: ...
    async def end(self, sample: Sample) -> None: ...
    async def close(self) -> None: ...


class TextReading:
    """The text is the content."""

    def __init__(self, renderer: Renderer, request: Request, emit: Emit) -> None:
        self.told = Told()
        self._renderer = renderer
        self._request = request
        self._emit = emit
        self._text = renderer.text_stream(request.sampling)
        self._fed = 0

    def feed(self, sample: Sample) -> None:
        before, self._fed = self._fed, len(sample.ids)
        delta = _details(self._renderer, self._request, sample, before)
        delta.content = self._text.feed(sample.ids[before:])
        self._tell(delta)

    async def end(self, sample: Sample) -> None:
        whole, self.told.stop_sequence = self._renderer.text(sample.ids, self._request.sampling)
        self._tell(Delta(content=self._text.end(whole)))

    def _tell(self, delta: Delta) -> None:
        if delta.content or delta.token_ids or delta.logprobs:
            self.told.content += delta.content
            self._emit(delta)

    async def close(self) -> None:
        pass


class ParsedReading:
    """The engine's parsers read the ids. Meanwhile further ones gather, so a slow parser gets fewer
    and longer parts, and never holds the stream up. A part counts when its answer is there: one that
    was broken off is simply read again."""

    def __init__(
        self, renderer: Renderer, parser: Engine, request: Request, prompt: list[int], emit: Emit
    ) -> None:
        self.told = Told()
        self._renderer = renderer
        self._parser = parser
        self._request = request
        self._prompt = prompt
        self._emit = emit
        self._chat = chat_request(request)
        self._state: msgspec.Raw | None = None
        self._fed = 0
        self._read = 0
        self._certain: Sequence[int] = ()
        self._more = asyncio.Event()
        # Ids that may become a stop string, or the end of turn, are not for the parser.
        stops = request.sampling.get("stop", ())
        self._hold = 1 + 4 * max((len(stop) for stop in stops), default=0)
        self._task = asyncio.create_task(self._read_for_ever())

    def feed(self, sample: Sample) -> None:
        before, self._fed = self._fed, len(sample.ids)
        details = _details(self._renderer, self._request, sample, before)
        if details.token_ids or details.logprobs:
            self._emit(details)
        self._certain = sample.ids[: -self._hold]
        self._more.set()

    async def _read_for_ever(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            if len(self._certain) > self._read:
                await self._read_part(self._certain, last=False)

    async def _read_part(self, ids: Sequence[int], last: bool) -> None:
        parsed, self._state = await self._parser.parse_chunk(
            ids[self._read :], self._prompt, self._chat, self._state, last
        )
        self._read = len(ids)
        delta = _delta(parsed)
        if delta.content or delta.reasoning or delta.tool_calls:
            self.told.add(delta)
            self._emit(delta)

    async def end(self, sample: Sample) -> None:
        await self.close()
        sampling = self._request.sampling
        text, stop = self._renderer.text(sample.ids, sampling)
        self.told.stop_sequence = stop
        spoken = self._renderer.without_end(sample.ids, text, sampling, stop is not None)
        await self._read_part(spoken, last=True)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def chat_request(request: Request) -> dict[str, Any]:
    """What the engine's parsers want to know of the call. Its messages are long, and not for them."""
    return {
        "messages": [{"role": "user", "content": "."}],
        "tools": request.tools,
        "tool_choice": request.tool_choice or ("auto" if request.tools else None),
        "chat_template_kwargs": request.template or None,
    }


def _delta(parsed: Parsed, numbered: bool = False) -> Delta:
    """`numbered`: whole calls come without an index and stand in their order."""
    calls = [
        ToolCallDelta(
            index=at if numbered else call.index,
            id=call.id,
            name=call.function.name,
            arguments=call.function.arguments or "",
        )
        for at, call in enumerate(parsed.tool_calls)
    ]
    return Delta(content=parsed.content or "", reasoning=parsed.reasoning or "", tool_calls=calls)


def _details(renderer: Renderer, request: Request, sample: Sample, start: int) -> Delta:
    """Ids and logprobs from `start` on, only for a client that asked for them."""
    delta = Delta()
    if request.token_ids:
        delta.token_ids = sample.ids[start:]
    if request.logprobs:
        delta.logprobs = token_logprobs(renderer, sample, start)
    return delta


def token_logprobs(renderer: Renderer, sample: Sample, start: int = 0) -> list[TokenLogprob]:
    """For a client that asked: one for every id from `start` on."""
    found = []
    for at in range(start, len(sample.ids)):
        top = sample.alternatives[at].top_logprobs if sample.alternatives else []
        found.append(
            TokenLogprob(
                id=sample.ids[at],
                token=renderer.token(sample.ids[at]),
                logprob=sample.logprobs[at],
                top=[
                    TokenLogprob(
                        id=other.token_id,
                        token=renderer.token(other.token_id),
                        logprob=other.logprob,
                    )
                    for other in top
                ],
            )
        )
    return found
