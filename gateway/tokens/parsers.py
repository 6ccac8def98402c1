"""Parses sampled ids into content, reasoning and tool calls.

Without tools the decoded text is the answer. With tools the engine's own parsers read the ids
(`derender`), since every model family writes tool calls in its own way. An engine that runs no parser
returns the raw text, which is what agents with their own parsers expect.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from gateway.dialects.request import AnswerDelta, Request, TokenLogprob, ToolCall, ToolCallDelta
from gateway.engines.engine import Engine
from gateway.engines.wire import ParsedMessage, SampledTokens
from gateway.tokens.renderer import Renderer

Emit = Callable[[AnswerDelta], None]


class ParsedAnswer(msgspec.Struct):
    """An answer as its client sees it."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    stop_sequence: str | None = None

    def add(self, delta: AnswerDelta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        for part in delta.tool_calls:
            while len(self.tool_calls) <= part.index:
                self.tool_calls.append(ToolCall(id="", name="", arguments=""))
            call = self.tool_calls[part.index]
            call.id = call.id or part.id or ""
            call.name = call.name or part.name or ""
            call.arguments += part.arguments


async def parse_answer(
    renderer: Renderer, parser: Engine | None, request: Request, ids: Sequence[int]
) -> ParsedAnswer:
    """Parses a complete answer; without `parser`, as plain text."""
    text, stop = renderer.text(ids, request.sampling)
    if parser is None:
        return ParsedAnswer(text, stop_sequence=stop)
    content_ids = renderer.without_end(ids, text, request.sampling, stop is not None)
    answer = ParsedAnswer(stop_sequence=stop)
    if content_ids:
        message = await parser.parse(content_ids, chat_request(request))
        answer.add(_delta(message, request, in_order=True))
    return answer


class StreamParser(Protocol):
    """Parses a streamed answer. `feed` is called after each chunk with everything sampled so far;
    `parsed` is the answer so far."""

    parsed: ParsedAnswer

    def feed(self, sample: SampledTokens) -> None: ...
    async def end(self, sample: SampledTokens) -> None: ...
    async def close(self) -> None: ...


class PlainTextParser:
    """Takes the decoded text as the content."""

    def __init__(self, renderer: Renderer, request: Request, emit: Emit) -> None:
        self.parsed = ParsedAnswer()
        self._renderer = renderer
        self._request = request
        self._emit = emit
        self._text = renderer.text_stream(request.sampling)
        self._fed = 0

    def feed(self, sample: SampledTokens) -> None:
        before, self._fed = self._fed, len(sample.ids)
        delta = _details(self._renderer, self._request, sample, before)
        delta.content = self._text.feed(sample.ids[before:])
        self._emit_delta(delta)

    async def end(self, sample: SampledTokens) -> None:
        text, self.parsed.stop_sequence = self._renderer.text(sample.ids, self._request.sampling)
        self._emit_delta(AnswerDelta(content=self._text.end(text)))

    def _emit_delta(self, delta: AnswerDelta) -> None:
        if delta.content or delta.token_ids or delta.logprobs:
            self.parsed.content += delta.content
            self._emit(delta)

    async def close(self) -> None:
        pass


class EngineParser:
    """Lets the engine's parsers read the ids. While a request to the parser is running, further ids
    gather, so a slow parser gets fewer and longer parts and never blocks the stream. Ids count as
    parsed once the parser has responded; a part whose request was cancelled is sent again."""

    def __init__(
        self, renderer: Renderer, parser: Engine, request: Request, prompt: list[int], emit: Emit
    ) -> None:
        self.parsed = ParsedAnswer()
        self._renderer = renderer
        self._parser = parser
        self._request = request
        self._context = renderer.parser_context(prompt)
        self._emit = emit
        self._chat = chat_request(request)
        self._state: msgspec.Raw | None = None
        self._fed = 0
        self._parsed_ids = 0
        self._certain: Sequence[int] = ()
        self._has_more = asyncio.Event()
        # Ids that may turn out to be a stop string, or the end of turn, are withheld from the parser.
        stops = request.sampling.get("stop", ())
        self._withheld = 1 + 4 * max((len(stop) for stop in stops), default=0)
        self._task = asyncio.create_task(self._parse_forever())

    def feed(self, sample: SampledTokens) -> None:
        before, self._fed = self._fed, len(sample.ids)
        details = _details(self._renderer, self._request, sample, before)
        if details.token_ids or details.logprobs:
            self._emit(details)
        self._certain = sample.ids[: -self._withheld]
        self._has_more.set()

    async def _parse_forever(self) -> None:
        while True:
            await self._has_more.wait()
            self._has_more.clear()
            if len(self._certain) > self._parsed_ids:
                await self._parse_part(self._certain, last=False)

    async def _parse_part(self, ids: Sequence[int], last: bool) -> None:
        message, self._state = await self._parser.parse_chunk(
            ids[self._parsed_ids :], self._context, self._chat, self._state, last
        )
        self._parsed_ids = len(ids)
        delta = _delta(message, self._request)
        if delta.content or delta.reasoning or delta.tool_calls:
            self.parsed.add(delta)
            self._emit(delta)

    async def end(self, sample: SampledTokens) -> None:
        await self.close()
        sampling = self._request.sampling
        text, stop = self._renderer.text(sample.ids, sampling)
        self.parsed.stop_sequence = stop
        content_ids = self._renderer.without_end(sample.ids, text, sampling, stop is not None)
        await self._parse_part(content_ids, last=True)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def chat_request(request: Request) -> dict[str, Any]:
    """The chat request that the engine's parsers need. They ignore messages, so a short one stands
    in."""
    return {
        "messages": [{"role": "user", "content": "."}],
        "tools": request.tools,
        "tool_choice": request.tool_choice or ("auto" if request.tools else None),
        "parallel_tool_calls": not request.single_tool_call,
        "chat_template_kwargs": request.template or None,
    }


def _delta(message: ParsedMessage, request: Request, in_order: bool = False) -> AnswerDelta:
    """`in_order`: the calls of a complete answer have no index; their order is their index. Of a
    request for a single call the first is kept. The Step keeps all that was sampled, and the next call
    continues it, so the model goes on from what it wrote."""
    calls = [
        ToolCallDelta(
            index=at if in_order else call.index,
            id=call.id,
            name=call.function.name,
            arguments=call.function.arguments or "",
        )
        for at, call in enumerate(message.tool_calls)
    ]
    if request.single_tool_call:
        calls = [call for call in calls if call.index == 0]
    return AnswerDelta(
        content=message.content or "", reasoning=message.reasoning or "", tool_calls=calls
    )


def _details(
    renderer: Renderer, request: Request, sample: SampledTokens, start: int
) -> AnswerDelta:
    """Ids and logprobs from `start` on, if the client asked for them."""
    delta = AnswerDelta()
    if request.token_ids:
        delta.token_ids = sample.ids[start:]
    if request.logprobs:
        delta.logprobs = token_logprobs(renderer, sample, start)
    return delta


def token_logprobs(renderer: Renderer, sample: SampledTokens, start: int = 0) -> list[TokenLogprob]:
    """The logprobs of all ids from `start` on, with their text."""
    logprobs = []
    for at in range(start, len(sample.ids)):
        top = sample.alternatives[at].top_logprobs if sample.alternatives else []
        logprobs.append(
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
    return logprobs
