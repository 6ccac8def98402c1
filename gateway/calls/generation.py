"""Generation: a prompt's ids go to an engine, sampled ids and a parsed answer come back.

A call that fails on one engine is retried on another, as long as none of the answer was streamed to the
client. An engine's 4xx is the client's mistake and goes to the client without a retry.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway import metrics
from gateway.dialects.request import AnswerDelta, Request
from gateway.engines.affinity import ANYWHERE, CacheAffinity
from gateway.engines.engine import ENGINE_ERRORS, Engine, EngineError
from gateway.engines.kv_cache import choose_salt, mark_kept
from gateway.engines.router import EngineRouter
from gateway.engines.wire import MalformedAnswer, SampledTokens
from gateway.errors import EngineFailed
from gateway.tokens.parsers import (
    Emit,
    EngineParser,
    ParsedAnswer,
    PlainTextParser,
    StreamParser,
    chat_request,
    parse_answer,
)
from gateway.tokens.renderer import Renderer
from pool.core.versions import Version
from servicekit import tracing

ATTEMPTS = 4
"""How often a call is tried."""
COMPLETE_FINISH_REASONS = ("stop", "length")
"""Finish reasons of a complete answer; vLLM uses `abort` for one that it dropped."""


class Generation(msgspec.Struct):
    """What an engine generated for a call."""

    sample: SampledTokens
    parsed: ParsedAnswer
    engine: str
    model: str


class Generator:
    """Generates answers with a tokenizer and engines; knows no trajectories."""

    def __init__(self, renderer: Renderer, engines: EngineRouter, parse_all: bool) -> None:
        self.renderer = renderer
        self.engines = engines
        self._parse_all = parse_all

    async def generate(
        self, request: Request, prompt: list[int], affinity: CacheAffinity, emit: Emit | None
    ) -> Generation:
        """Tries engines until one has answered. With `emit`, the answer is streamed."""
        failed_urls: set[str] = set()
        stream = EmitTracker(emit) if emit else None
        failure: Exception | None = None
        for _ in range(ATTEMPTS):
            engine = await self.engines.acquire(affinity, failed_urls)
            engine.running += 1
            try:
                attempt = self._attempt_traced if tracing.is_enabled() else self._attempt
                return await attempt(engine, request, prompt, affinity, stream)
            except (*ENGINE_ERRORS, EngineError) as error:
                failure = error
                failed_urls.add(engine.url)
                metrics.engine_failures.inc()
                self.engines.report_failure(engine, error)
                if stream and stream.has_emitted:
                    break
            finally:
                engine.running -= 1
        reason = str(failure) or type(failure).__name__
        raise EngineFailed(
            f"No engine returned a complete answer; the last error was: {reason}. Retry the request."
        ) from failure

    async def _attempt_traced(
        self,
        engine: Engine,
        request: Request,
        prompt: list[int],
        affinity: CacheAffinity,
        emit: "EmitTracker | None",
    ) -> Generation:
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
            generation = await self._attempt(engine, request, prompt, affinity, emit)
            sample = generation.sample
            span.set_attributes(
                response_model=generation.model,
                output_tokens=len(sample.ids),
                finish_reasons=[sample.finish_reason],
            )
        return generation

    async def _attempt(
        self,
        engine: Engine,
        request: Request,
        prompt: list[int],
        affinity: CacheAffinity,
        emit: "EmitTracker | None",
    ) -> Generation:
        began = time.perf_counter()
        keep_kv = self.engines.policy.keep_kv
        salt = choose_salt(engine.version, affinity.salt, keep_kv) if engine.version else None
        body = await _generate_body(engine, request, prompt, salt, stream=emit is not None)
        parser = engine if self._needs_parser(request) else None
        if emit is None:
            sample = SampledTokens()
            sample.add(await engine.generate(body, bool(request.top_logprobs)))
            _check_complete(sample)
            parsed = await parse_answer(self.renderer, parser, request, sample.ids)
        else:
            stream_parser = self._stream_parser(parser, request, prompt, emit)
            sample, parsed = await _stream(engine, body, bool(request.top_logprobs), stream_parser)
        if keep_kv and salt is not None:
            sample.segments = mark_kept(sample.segments, salt)
        metrics.upstream_seconds.observe(time.perf_counter() - began)
        return Generation(sample, parsed, engine.url, (engine.models or [request.model])[0])

    async def prompt_logprobs(
        self, prompt: list[int], alternatives: int
    ) -> list[dict[str, float] | None]:
        """The logprob of every id of a prompt and of its likeliest alternatives, by id; None for
        the first."""
        engine = await self.engines.acquire(ANYWHERE, set())
        sampling = {"prompt_logprobs": alternatives, "max_tokens": 1, "temperature": 0}
        body = msgspec.json.encode({"token_ids": prompt, "sampling_params": sampling})
        try:
            return await engine.prompt_logprobs(body)
        except (*ENGINE_ERRORS, EngineError) as error:
            self.engines.report_failure(engine, error)
            raise EngineFailed(f"No engine returned prompt logprobs: {error}") from error

    def _stream_parser(
        self, parser: Engine | None, request: Request, prompt: list[int], emit: Emit
    ) -> StreamParser:
        if parser is None:
            return PlainTextParser(self.renderer, request, emit)
        return EngineParser(self.renderer, parser, request, prompt, emit)

    def _needs_parser(self, request: Request) -> bool:
        """Whether the engine's parsers read the answer, or it is plain text."""
        return request.prompt is None and (self._parse_all or bool(request.tools))

    async def parse_recorded(self, request: Request, ids: Sequence[int]) -> ParsedAnswer:
        """Parses an answer whose ids are in the log."""
        if not self._needs_parser(request):
            return await parse_answer(self.renderer, None, request, ids)
        failed_urls: set[str] = set()
        while len(failed_urls) < ATTEMPTS:
            engine = await self.engines.acquire(ANYWHERE, failed_urls)
            try:
                return await parse_answer(self.renderer, engine, request, ids)
            except (*ENGINE_ERRORS, EngineError) as error:
                if engine.url in failed_urls:
                    break  # there is no other engine
                failed_urls.add(engine.url)
                self.engines.report_failure(engine, error)
        raise EngineFailed(
            "The answer is recorded, but no engine could parse its tool calls. Retry the request."
        )


class EmitTracker:
    """Remembers whether anything was streamed: from then on no other engine can take over."""

    def __init__(self, emit: Emit) -> None:
        self.has_emitted = False
        self._emit = emit

    def __call__(self, delta: AnswerDelta) -> None:
        if not self.has_emitted:
            tracing.current().event("first_token")
        self.has_emitted = True
        self._emit(delta)


async def _generate_body(
    engine: Engine, request: Request, prompt: list[int], salt: Version | None, stream: bool
) -> bytes:
    sampling = request.sampling | {"logprobs": request.top_logprobs}
    if request.forces_tool:
        sampling["structured_outputs"] = await engine.tool_grammar(chat_request(request))
    body: dict[str, Any] = {"token_ids": prompt, "sampling_params": sampling, "stream": stream}
    if salt is not None:
        body["cache_salt"] = str(salt)
    return msgspec.json.encode(body)


async def _stream(
    engine: Engine, body: bytes, alternatives: bool, parser: StreamParser
) -> tuple[SampledTokens, ParsedAnswer]:
    sample = SampledTokens()
    try:
        async for choice in engine.stream(body, alternatives):
            sample.add(choice)
            parser.feed(sample)
        _check_complete(sample)
        await parser.end(sample)
    finally:
        await parser.close()
    return sample, parser.parsed


def _check_complete(sample: SampledTokens) -> None:
    if sample.finish_reason is None:
        raise MalformedAnswer("the engine's answer has no finish_reason")
    if sample.finish_reason not in COMPLETE_FINISH_REASONS:
        raise EngineError(f"the engine stopped with finish_reason {sample.finish_reason}")
