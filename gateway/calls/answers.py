"""Makes the Answer of a call: of one that was just generated, or of a Step that the log has."""

from collections.abc import Sequence

from gateway.calls.generation import Generator
from gateway.dialects.request import Answer, AnswerDelta, Request, ToolCallDelta, Usage
from gateway.engines.wire import SampledTokens
from gateway.state.trajectory import RecordedStep
from gateway.tokens.parsers import ParsedAnswer, token_logprobs
from gateway.tokens.renderer import Renderer
from pool.core.versions import Version
from schemas import Segment, Step
from schemas.packing import unpack_ids, unpack_logprobs


def make_answer(
    step_id: str,
    created: int,
    model: str,
    parsed: ParsedAnswer,
    sample: SampledTokens,
    prompt_tokens: int,
) -> Answer:
    return Answer(
        step_id=step_id,
        created=created,
        model=model,
        content=parsed.content,
        reasoning=parsed.reasoning,
        tool_calls=parsed.tool_calls,
        finish_reason=_finish_reason(parsed, sample),
        stop_sequence=parsed.stop_sequence,
        usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=len(sample.ids)),
        versions=_versions(sample.segments),
    )


def _versions(segments: Sequence[Segment]) -> str:
    """The versions that had a part in sampling the answer, also by keys and values in the cache."""
    versions = {
        Version(segment.incarnation, number)
        for segment in segments
        for number in (segment.oldest_version, segment.version)
    }
    return ",".join(map(str, sorted(versions)))


def _finish_reason(parsed: ParsedAnswer, sample: SampledTokens) -> str:
    """`tool_calls` only for complete calls: the arguments of one that was cut off are no valid JSON,
    and `length` says so."""
    is_complete = sample.finish_reason == "stop"
    return "tool_calls" if parsed.tool_calls and is_complete else sample.finish_reason or ""


def add_token_details(
    answer: Answer, request: Request, renderer: Renderer, sample: SampledTokens, prompt: list[int]
) -> None:
    """Adds logprobs and token ids, if the client asked for them."""
    if request.logprobs:
        answer.logprobs = token_logprobs(renderer, sample)
    if request.token_ids:
        answer.token_ids, answer.prompt_ids = sample.ids, prompt


async def rebuild_answer(
    generator: Generator, request: Request, recorded: RecordedStep, prompt: bytes
) -> Answer:
    """The answer of a recorded Step, made from its ids. It has the logprobs of the sampled ids
    only: the log does not store alternatives."""
    step = recorded.step
    sample = _recorded_sample(step)
    parsed = await generator.parse_recorded(request, sample.ids)
    answer = make_answer(
        step.step_id, step.created_at // 1000, step.model, parsed, sample, recorded.prompt_tokens
    )
    add_token_details(answer, request, generator.renderer, sample, list(unpack_ids(prompt)))
    return answer


def _recorded_sample(step: Step) -> SampledTokens:
    return SampledTokens(
        ids=list(unpack_ids(step.response_ids)),
        logprobs=list(unpack_logprobs(step.response_logprobs)),
        finish_reason=step.finish_reason,
        segments=step.segments,
    )


def as_delta(answer: Answer) -> AnswerDelta:
    """A complete answer as the only delta of a stream."""
    return AnswerDelta(
        content=answer.content,
        reasoning=answer.reasoning,
        tool_calls=[
            ToolCallDelta(index=at, id=call.id, name=call.name, arguments=call.arguments)
            for at, call in enumerate(answer.tool_calls)
        ],
        logprobs=answer.logprobs,
        token_ids=answer.token_ids,
    )
