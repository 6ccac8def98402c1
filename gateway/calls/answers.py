"""Answers: of a call that was just generated, and of a Step that the log has."""

from gateway.calls.generation import Generator
from gateway.dialects.request import Answer, Delta, Request, ToolCallDelta, Usage
from gateway.engines.wire import Sample
from gateway.state.trajectory import Written
from gateway.tokens.parsers import Told, token_logprobs
from gateway.tokens.renderer import Renderer
from schemas import Step
from schemas.packing import unpack_ids, unpack_logprobs


def answer(
    step_id: str,
    created: int,
    model: str,
    told: Told,
    sample: Sample,
    prompt_tokens: int,
) -> Answer:
    return Answer(
        step_id=step_id,
        created=created,
        model=model,
        content=told.content,
        reasoning=told.reasoning,
        tool_calls=told.tool_calls,
        finish_reason=_finish_reason(told, sample),
        stop_sequence=told.stop_sequence,
        usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=len(sample.ids)),
    )


def _finish_reason(told: Told, sample: Sample) -> str:
    """A call may have been cut: then its arguments are no JSON, and `length` says so."""
    complete = sample.finish_reason == "stop"
    return "tool_calls" if told.tool_calls and complete else sample.finish_reason or ""


def add_details(
    answer: Answer, request: Request, renderer: Renderer, sample: Sample, prompt: list[int]
) -> None:
    """Logprobs and ids, for a client that asked for them."""
    if request.logprobs:
        answer.logprobs = token_logprobs(renderer, sample)
    if request.token_ids:
        answer.token_ids, answer.prompt_ids = sample.ids, prompt


async def answer_again(
    generator: Generator, request: Request, written: Written, prompt: bytes
) -> Answer:
    """The answer that a Step was, made from its ids. Of logprobs it has those of the sampled ids."""
    step = written.step
    sample = sample_of(step)
    told = await generator.read_again(request, sample.ids)
    again = answer(
        step.step_id, step.created_at // 1000, step.model, told, sample, written.prompt_tokens
    )
    add_details(again, request, generator.renderer, sample, list(unpack_ids(prompt)))
    return again


def sample_of(step: Step) -> Sample:
    return Sample(
        ids=list(unpack_ids(step.response_ids)),
        logprobs=list(unpack_logprobs(step.response_logprobs)),
        finish_reason=step.finish_reason,
        segments=step.segments,
    )


def as_delta(answer: Answer) -> Delta:
    """A whole answer as the one part of a stream."""
    return Delta(
        content=answer.content,
        reasoning=answer.reasoning,
        tool_calls=[
            ToolCallDelta(index=at, id=call.id, name=call.name, arguments=call.arguments)
            for at, call in enumerate(answer.tool_calls)
        ],
        logprobs=answer.logprobs,
        token_ids=answer.token_ids,
    )
