"""OpenAI's /completions: a prompt of text or token ids, no chat template."""

from typing import Any

import msgspec

from gateway.dialects.chat import DONE, MAX_TOP_LOGPROBS, StreamOptions, usage_body
from gateway.dialects.refused_fields import RefusingBody, refuse_fields
from gateway.dialects.request import Answer, AnswerDelta, Request, TokenLogprob, event
from gateway.dialects.sampling import Natural, sampling_params
from gateway.errors import BadRequest, decoded

DEFAULT_MAX_TOKENS = 16
"""OpenAI's and vLLM's default for this route: clients that leave max_tokens out expect a short
answer."""
ONE_PROMPT = "prompt must be one string or one list of token ids. Send one request per prompt."


class CompletionsBody(RefusingBody, kw_only=True):
    prompt: str | list[Any]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Natural | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    return_token_ids: bool | None = None


_decode = msgspec.json.Decoder(CompletionsBody).decode


class Completions:
    """The dialect of /completions."""

    name = "completions"
    body = CompletionsBody

    def parse(self, body: bytes) -> Request:
        completion = decoded(_decode, body)
        refuse_fields(completion)
        _refuse_unsupported(completion)
        return Request(
            prompt=_prompt(completion.prompt),
            sampling={"max_tokens": DEFAULT_MAX_TOKENS} | sampling_params(completion),
            model=completion.model or "",
            stream=bool(completion.stream),
            include_usage=bool(
                completion.stream_options and completion.stream_options.include_usage
            ),
            logprobs=completion.logprobs is not None,
            top_logprobs=completion.logprobs or 0,
            token_ids=bool(completion.return_token_ids),
        )

    def answer(self, request: Request, answer: Answer) -> bytes:
        choice: dict[str, Any] = {
            "index": 0,
            "text": answer.content,
            "logprobs": CompletionLogprobs().body(answer.logprobs) if request.logprobs else None,
            "finish_reason": answer.finish_reason,
        }
        if request.token_ids:
            choice |= {"token_ids": answer.token_ids, "prompt_token_ids": answer.prompt_ids}
        head = _head(answer.step_id, answer.created, answer.model)
        head["system_fingerprint"] = answer.versions
        return msgspec.json.encode(head | {"choices": [choice], "usage": usage_body(answer.usage)})

    def writer(
        self, request: Request, step_id: str, created: int, model: str
    ) -> "CompletionsWriter":
        return CompletionsWriter(request, step_id, created, model)


class CompletionsWriter:
    """One streamed completion."""

    def __init__(self, request: Request, step_id: str, created: int, model: str) -> None:
        self._request = request
        self._head = _head(step_id, created, model)
        self._logprobs = CompletionLogprobs()

    def begin(self) -> bytes:
        return b""

    def delta(self, delta: AnswerDelta) -> bytes:
        choice: dict[str, Any] = {"index": 0, "text": delta.content, "finish_reason": None}
        choice["logprobs"] = self._logprobs.body(delta.logprobs) if self._request.logprobs else None
        if self._request.token_ids:
            choice["token_ids"] = delta.token_ids
        return self._chunk(choices=[choice])

    def end(self, answer: Answer) -> bytes:
        self._head["system_fingerprint"] = answer.versions
        last: dict[str, Any] = {"index": 0, "text": "", "logprobs": None}
        last["finish_reason"] = answer.finish_reason
        if self._request.token_ids:
            last["prompt_token_ids"] = answer.prompt_ids
        events = self._chunk(choices=[last])
        if self._request.include_usage:
            events += self._chunk(choices=[], usage=usage_body(answer.usage))
        return events + DONE

    def error(self, message: str, kind: str) -> bytes:
        error = {"message": message, "type": kind, "param": None, "code": None}
        return event(msgspec.json.encode({"error": error}))

    def _chunk(self, **fields: Any) -> bytes:
        return event(msgspec.json.encode(self._head | fields))


class CompletionLogprobs:
    """Logprobs in this route's shape; the text offsets continue from chunk to chunk."""

    def __init__(self) -> None:
        self._offset = 0

    def body(self, tokens: list[TokenLogprob]) -> dict[str, list[Any]]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.token)
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": offsets,
        }


def _top(token: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and the sampled one, which may not be among them."""
    return {other.token: other.logprob for other in token.top} | {token.token: token.logprob}


def _head(step_id: str, created: int, model: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{step_id}",
        "object": "text_completion",
        "created": created,
        "model": model,
    }


def _refuse_unsupported(completion: CompletionsBody) -> None:
    if completion.echo:
        raise BadRequest(
            "echo is not supported: the answer contains only generated text.", param="echo"
        )
    if completion.best_of is not None and completion.best_of > 1:
        raise BadRequest(
            "best_of must be 1. Start one trajectory per sample and choose among the answers.",
            param="best_of",
        )
    if completion.suffix:
        raise BadRequest(
            "suffix is not supported: text is only generated after the prompt.", param="suffix"
        )
    if (completion.logprobs or 0) > MAX_TOP_LOGPROBS:
        raise BadRequest(f"logprobs must be at most {MAX_TOP_LOGPROBS}.", param="logprobs")


def _prompt(prompt: str | list[Any]) -> str | list[int]:
    """The only prompt; clients also send it as a list of one."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if not prompt:
        raise BadRequest("prompt must not be empty.", param="prompt")
    if isinstance(prompt, str) or all(_is_id(value) for value in prompt):
        return prompt
    raise BadRequest(ONE_PROMPT, param="prompt")


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31
