"""Token ids in, token ids out, in the shapes of vLLM's and SGLang's own servers.

Environments that keep track of ids themselves talk to `/generate` of such a server. Ours answers both
shapes, told apart by their fields, and records what it answers.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from gateway.calls.unbound_calls import samples
from gateway.dialects.request import Request
from gateway.dialects.sampling import SamplingBody, sampling_params
from gateway.errors import BadRequest
from gateway.http.bodies import decode
from gateway.tokens.renderer import Renderer
from pool.core.submitted_steps import TokenId
from schemas import Step
from schemas.packing import unpack_ids, unpack_logprobs

Ids = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
MAX_PROMPT_LOGPROBS = 20
"""What vLLM gives at most, unless it is told otherwise."""


class PromptIds(msgspec.Struct):
    prompt_token_ids: Ids


class VllmBody(SamplingBody, kw_only=True):
    prompt: PromptIds | str
    logprobs: int | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_LOGPROBS)] | None = None
    stream: bool = False


class SglangSampling(SamplingBody, kw_only=True):
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class SglangBody(msgspec.Struct, kw_only=True):
    input_ids: Ids | None = None
    text: str | None = None
    sampling_params: SglangSampling = msgspec.field(default_factory=SglangSampling)
    return_logprob: bool = False
    stream: bool = False


class Asked(msgspec.Struct):
    """What is wanted, whichever shape it came in."""

    request: Request
    count: int
    is_sglang: bool
    prompt_logprobs: int | None = None


class _Shape(msgspec.Struct):
    """The fields by which the shapes are told apart."""

    prompt: Any = None
    input_ids: Any = None
    text: Any = None


def asked_of(body: bytes) -> Asked | None:
    """None: it has neither shape."""
    try:
        shape = msgspec.json.decode(body, type=_Shape)
    except msgspec.DecodeError:
        return None
    if shape.prompt is not None:
        return _vllm(decode(body, VllmBody))
    if shape.input_ids is not None or shape.text is not None:
        return _sglang(decode(body, SglangBody))
    return None


def _vllm(asked: VllmBody) -> Asked:
    _refuse_stream(asked.stream)
    prompt = asked.prompt if isinstance(asked.prompt, str) else asked.prompt.prompt_token_ids
    return Asked(_request(prompt, asked), samples(asked.n or 1), False, asked.prompt_logprobs)


def _sglang(asked: SglangBody) -> Asked:
    _refuse_stream(asked.stream)
    prompt = asked.input_ids or asked.text
    if not prompt:
        raise BadRequest("give input_ids or text", param="input_ids")
    sampling = asked.sampling_params
    request = _request(prompt, sampling)
    if sampling.max_new_tokens is not None:
        request.sampling["max_tokens"] = sampling.max_new_tokens
    return Asked(request, samples(sampling.n or 1), True)


def _refuse_stream(stream: bool) -> None:
    if stream:
        raise BadRequest("this route does not stream", param="stream")


def _request(prompt: str | list[int], sampling: SamplingBody) -> Request:
    return Request(prompt=prompt, sampling=sampling_params(msgspec.structs.replace(sampling, n=1)))


def told(asked: Asked, steps: Sequence[Step], prompt: Sequence[int], renderer: Renderer) -> bytes:
    """The answer in the shape of the question. `prompt`: as it was sent to the engine."""
    outputs = [
        (unpack_ids(step.response_ids).tolist(), unpack_logprobs(step.response_logprobs).tolist())
        for step in steps
    ]
    texts = [renderer.text(ids, asked.request.sampling)[0] for ids, _ in outputs]
    if asked.is_sglang:
        answers = [
            _sglang_answer(text, ids, logprobs, step, len(prompt))
            for text, (ids, logprobs), step in zip(texts, outputs, steps, strict=True)
        ]
        return msgspec.json.encode(answers[0] if asked.count == 1 else answers)
    return msgspec.json.encode(
        {
            "text": texts,
            "prompt": asked.request.prompt if isinstance(asked.request.prompt, str) else None,
            "finish_reasons": [step.finish_reason for step in steps],
            "logprobs": [
                [[{str(id_): logprob}] for id_, logprob in zip(*output, strict=True)]
                for output in outputs
            ],
            "token_ids": [ids for ids, _ in outputs],
            "prompt_token_ids": prompt,
        }
    )


def told_logprobs(prompt: Sequence[int], logprobs: Sequence[dict[str, float] | None]) -> bytes:
    """vLLM's shape, of a question about the prompt only."""
    return msgspec.json.encode({"prompt_token_ids": prompt, "prompt_logprobs": logprobs})


def _sglang_answer(
    text: str, ids: list[int], logprobs: list[float], step: Step, prompt_tokens: int
) -> dict[str, Any]:
    return {
        "text": text,
        "output_ids": ids,
        "meta_info": {
            "id": step.step_id,
            "finish_reason": {"type": step.finish_reason},
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(ids),
            "output_token_logprobs": [
                [logprob, id_, None] for id_, logprob in zip(ids, logprobs, strict=True)
            ],
        },
    }
