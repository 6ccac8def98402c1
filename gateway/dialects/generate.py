"""The dialects of /generate: token ids in, token ids out, in steplog's, vLLM's or SGLang's shape.

Environments that handle ids themselves use this route of a vLLM or SGLang server. The gateway accepts
both shapes, tells them apart by their fields, and records what it answers. A request in steplog's own
shape (`prompt_ids`) is not recorded: its agent submits the Steps.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from gateway.dialects.request import Request
from gateway.dialects.sampling import (
    SamplingBody,
    check_sample_count,
    check_sampling,
    sampling_params,
    stop_strings,
)
from gateway.engines.wire import SampledTokens
from gateway.errors import BadRequest
from gateway.http.bodies import decode
from gateway.tokens.renderer import Renderer
from pool.core.submitted_steps import TokenId
from schemas import Step
from schemas.packing import unpack_ids, unpack_logprobs

Ids = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
MAX_PROMPT_LOGPROBS = 20
"""vLLM's own default limit."""


class GenerateBody(msgspec.Struct, kw_only=True):
    """steplog's own shape."""

    prompt_ids: Ids
    sampling_params: dict[str, Any] = {}
    image_data: Any = None
    video_data: Any = None


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


class TokenLevelRequest(msgspec.Struct):
    """A request in vLLM's or SGLang's shape."""

    request: Request
    count: int
    is_sglang: bool
    prompt_logprobs: int | None = None


class _ShapeFields(msgspec.Struct):
    """The fields that tell the shapes apart."""

    prompt: Any = None
    input_ids: Any = None
    text: Any = None


def parse_token_level(body: bytes) -> TokenLevelRequest | None:
    """The request, if it has vLLM's or SGLang's shape; None otherwise."""
    try:
        fields = msgspec.json.decode(body, type=_ShapeFields)
    except msgspec.DecodeError:
        return None
    if fields.prompt is not None:
        return _parse_vllm(decode(body, VllmBody))
    if fields.input_ids is not None or fields.text is not None:
        return _parse_sglang(decode(body, SglangBody))
    return None


def _parse_vllm(body: VllmBody) -> TokenLevelRequest:
    _refuse_stream(body.stream)
    prompt = body.prompt if isinstance(body.prompt, str) else body.prompt.prompt_token_ids
    count = check_sample_count(body.n or 1)
    return TokenLevelRequest(_request(prompt, body), count, False, body.prompt_logprobs)


def _parse_sglang(body: SglangBody) -> TokenLevelRequest:
    _refuse_stream(body.stream)
    prompt = body.input_ids or body.text
    if not prompt:
        raise BadRequest("The body needs input_ids or text, not empty.", param="input_ids")
    sampling = body.sampling_params
    request = _request(prompt, sampling)
    if sampling.max_new_tokens is not None:
        request.sampling["max_tokens"] = sampling.max_new_tokens
    return TokenLevelRequest(request, check_sample_count(sampling.n or 1), True)


def _refuse_stream(stream: bool) -> None:
    if stream:
        raise BadRequest("/generate does not stream. Leave stream out.", param="stream")


def _request(prompt: str | list[int], sampling: SamplingBody) -> Request:
    return Request(prompt=prompt, sampling=sampling_params(msgspec.structs.replace(sampling, n=1)))


def token_level_answer(
    parsed: TokenLevelRequest, steps: Sequence[Step], prompt: Sequence[int], renderer: Renderer
) -> bytes:
    """The answer in the request's shape. `prompt` is what the engine got."""
    outputs = [
        (unpack_ids(step.response_ids).tolist(), unpack_logprobs(step.response_logprobs).tolist())
        for step in steps
    ]
    texts = [renderer.text(ids, parsed.request.sampling)[0] for ids, _ in outputs]
    if parsed.is_sglang:
        answers = [
            _sglang_answer(text, ids, logprobs, step, len(prompt))
            for text, (ids, logprobs), step in zip(texts, outputs, steps, strict=True)
        ]
        return msgspec.json.encode(answers[0] if parsed.count == 1 else answers)
    return msgspec.json.encode(
        {
            "text": texts,
            "prompt": parsed.request.prompt if isinstance(parsed.request.prompt, str) else None,
            "finish_reasons": [step.finish_reason for step in steps],
            "logprobs": [
                [[{str(id_): logprob}] for id_, logprob in zip(*output, strict=True)]
                for output in outputs
            ],
            "token_ids": [ids for ids, _ in outputs],
            "prompt_token_ids": prompt,
        }
    )


def prompt_logprobs_answer(
    prompt: Sequence[int], logprobs: Sequence[dict[str, float] | None]
) -> bytes:
    """The answer to a request for prompt logprobs, in vLLM's shape."""
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


def parse_own_shape(body: bytes) -> tuple[Request, list[int]]:
    """The request in steplog's own shape, and its prompt's ids."""
    fields = decode(body, GenerateBody)
    if fields.image_data or fields.video_data:
        raise BadRequest(
            "This gateway accepts text only. Leave image_data and video_data out.",
            param="image_data" if fields.image_data else "video_data",
        )
    sampling = _own_sampling(fields.sampling_params)
    return Request(prompt=fields.prompt_ids, sampling=sampling), fields.prompt_ids


def _own_sampling(params: dict[str, Any]) -> dict[str, Any]:
    """Any of vLLM's sampling parameters; those that the gateway knows are checked."""
    checked = check_sampling(params, "sampling_params")
    if checked.n not in (None, 1):
        raise BadRequest(
            "n must be 1 here. Send one request per sample.", param="sampling_params.n"
        )
    sampling = {n: v for n, v in params.items() if v is not None and n not in ("logprobs", "stop")}
    stops = stop_strings(checked.stop)
    return sampling | {"stop": stops} if stops else sampling


def own_shape_answer(sample: SampledTokens) -> bytes:
    """The answer in steplog's own shape."""
    newest = sample.segments[-1]
    return msgspec.json.encode(
        {
            "token_ids": sample.ids,
            "log_probs": sample.logprobs,
            "stop_reason": sample.finish_reason,
            "weight_version": f"{newest.incarnation}.{newest.version}",
        }
    )
