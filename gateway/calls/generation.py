"""Ids in, an answer out: the part of a call that engines do.

An engine that fails is replaced by another one, as long as nothing of its answer was passed on. What
is the client's mistake goes to the client, whichever engine says it.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway import metrics
from gateway.dialects.request import Delta, Request
from gateway.engines.engine import TROUBLES, Engine, EngineTrouble
from gateway.engines.fleet import Engines
from gateway.engines.wire import Malformed, Sample
from gateway.errors import EngineFailed
from gateway.tokens.parsers import (
    Emit,
    ParsedReading,
    Reading,
    TextReading,
    Told,
    chat_request,
    read,
)
from gateway.tokens.renderer import Renderer
from servicekit import tracing

ATTEMPTS = 4
"""Times that a call is tried."""
ENDS = ("stop", "length")
"""Finish reasons of a whole answer; vLLM says `abort` of one that was thrown out."""


class Outcome(msgspec.Struct):
    sample: Sample
    told: Told
    engine: str
    model: str


class Generator:
    """A tokenizer and engines; knows no trajectory."""

    def __init__(self, renderer: Renderer, engines: Engines, parse_all: bool) -> None:
        self.renderer = renderer
        self.engines = engines
        self._parse_all = parse_all

    async def generate(
        self, request: Request, prompt: list[int], favourite: str | None, emit: Emit | None
    ) -> Outcome:
        """Tries engines until one has answered. With `emit`, its text is passed on as it comes."""
        avoid: set[str] = set()
        watched = Watched(emit) if emit else None
        failure: Exception | None = None
        for _ in range(ATTEMPTS):
            engine = await self.engines.acquire(favourite, avoid)
            engine.running += 1
            try:
                attempt = self._attempt_traced if tracing.is_enabled() else self._attempt
                return await attempt(engine, request, prompt, watched)
            except (*TROUBLES, EngineTrouble) as error:
                failure = error
                avoid.add(engine.url)
                metrics.engine_failures.inc()
                self.engines.failed(engine, error)
                if watched and watched.passed_on:
                    break
            finally:
                engine.running -= 1
        reason = str(failure) or type(failure).__name__
        raise EngineFailed(f"no engine gave a whole answer: {reason}") from failure

    async def _attempt_traced(
        self, engine: Engine, request: Request, prompt: list[int], emit: "Watched | None"
    ) -> Outcome:
        operation = "chat" if request.prompt is None else "text_completion"
        with tracing.span(
            f"{operation} {request.model}".strip(),
            "client",
            operation=operation,
            request_model=request.model,
            engine=engine.name,
            version=str(engine.version),
            input_tokens=len(prompt),
        ) as span:
            outcome = await self._attempt(engine, request, prompt, emit)
            sample = outcome.sample
            span.set_attributes(
                response_model=outcome.model,
                output_tokens=len(sample.ids),
                finish_reasons=[sample.finish_reason],
            )
        return outcome

    async def _attempt(
        self, engine: Engine, request: Request, prompt: list[int], emit: "Watched | None"
    ) -> Outcome:
        began = time.perf_counter()
        body = await _body(engine, request, prompt, stream=emit is not None)
        parser = engine if self._parses(request) else None
        if emit is None:
            sample = Sample()
            sample.add(await engine.generate(body, bool(request.top_logprobs)))
            _check_whole(sample)
            told = await read(self.renderer, parser, request, sample.ids)
        else:
            reading = self._reading(parser, request, prompt, emit)
            sample, told = await _stream(engine, body, bool(request.top_logprobs), reading)
        metrics.upstream_seconds.observe(time.perf_counter() - began)
        return Outcome(sample, told, engine.url, (engine.models or [request.model])[0])

    async def prompt_logprobs(
        self, prompt: list[int], alternatives: int
    ) -> list[dict[str, float] | None]:
        """What an engine thinks of a prompt: for each id its logprob and the likeliest others', by id;
        nothing for the first."""
        engine = await self.engines.acquire(None, set())
        sampling = {"prompt_logprobs": alternatives, "max_tokens": 1, "temperature": 0}
        body = msgspec.json.encode({"token_ids": prompt, "sampling_params": sampling})
        try:
            return await engine.prompt_logprobs(body)
        except (*TROUBLES, EngineTrouble) as error:
            self.engines.failed(engine, error)
            raise EngineFailed(f"no engine told the prompt's logprobs: {error}") from error

    def _reading(
        self, parser: Engine | None, request: Request, prompt: list[int], emit: Emit
    ) -> Reading:
        if parser is None:
            return TextReading(self.renderer, request, emit)
        return ParsedReading(self.renderer, parser, request, prompt, emit)

    def _parses(self, request: Request) -> bool:
        return request.prompt is None and (self._parse_all or bool(request.tools))

    async def read_again(self, request: Request, ids: Sequence[int]) -> Told:
        """What ids say that are in the log."""
        if not self._parses(request):
            return await read(self.renderer, None, request, ids)
        avoid: set[str] = set()
        while len(avoid) < ATTEMPTS:
            engine = await self.engines.acquire(None, avoid)
            try:
                return await read(self.renderer, engine, request, ids)
            except (*TROUBLES, EngineTrouble) as error:
                if engine.url in avoid:
                    break  # there is no other one
                avoid.add(engine.url)
                self.engines.failed(engine, error)
        raise EngineFailed("no engine could read the answer, which is in the log; try again")


class Watched:
    """Remembers whether anything was passed on: from then on no other engine can take over."""

    def __init__(self, emit: Emit) -> None:
        self.passed_on = False
        self._emit = emit

    def __call__(self, delta: Delta) -> None:
        if not self.passed_on:
            tracing.current().event("first_token")
        self.passed_on = True
        self._emit(delta)


async def _body(engine: Engine, request: Request, prompt: list[int], stream: bool) -> bytes:
    sampling = request.sampling | {"logprobs": request.top_logprobs}
    if request.forces_tool:
        sampling["structured_outputs"] = await engine.tool_grammar(chat_request(request))
    body: dict[str, Any] = {"token_ids": prompt, "sampling_params": sampling, "stream": stream}
    if engine.version is not None:
        # What old weights computed is not found again under the new version's name.
        body["cache_salt"] = str(engine.version)
    return msgspec.json.encode(body)


async def _stream(
    engine: Engine, body: bytes, alternatives: bool, reading: Reading
) -> tuple[Sample, Told]:
    sample = Sample()
    try:
        async for choice in engine.stream(body, alternatives):
            sample.add(choice)
            reading.feed(sample)
        _check_whole(sample)
        await reading.end(sample)
    finally:
        await reading.close()
    return sample, reading.told


def _check_whole(sample: Sample) -> None:
    if sample.finish_reason is None:
        raise Malformed("the engine's answer has no end")
    if sample.finish_reason not in ENDS:
        raise EngineTrouble(f"the engine ended the answer with {sample.finish_reason}")
