"""OpenAI's /completions: a prompt of text or token ids, no chat template."""

from typing import Any

import msgspec

from gateway.dialects.chat import DONE, MAX_TOP_LOGPROBS, StreamOptions, usage
from gateway.dialects.request import Answer, Delta, Request, TokenLogprob, event
from gateway.dialects.sampling import Natural, SamplingBody, sampling_params
from gateway.errors import BadRequest, decoded

DEFAULT_MAX_TOKENS = 16
"""OpenAI's for this route, and vLLM's: clients that leave it out count on a short answer."""
ONE_PROMPT = "prompt must be one text or one list of token ids; send a request for each prompt"


class CompletionsBody(SamplingBody, kw_only=True):
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
    """The dialect."""

    name = "completions"
    body = CompletionsBody

    def parse(self, body: bytes) -> Request:
        asked = decoded(_decode, body)
        _refuse_what_is_not_served(asked)
        return Request(
            prompt=_prompt(asked.prompt),
            sampling={"max_tokens": DEFAULT_MAX_TOKENS} | sampling_params(asked),
            model=asked.model or "",
            stream=bool(asked.stream),
            include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
            logprobs=asked.logprobs is not None,
            top_logprobs=asked.logprobs or 0,
            token_ids=bool(asked.return_token_ids),
        )

    def answer(self, request: Request, answer: Answer) -> bytes:
        choice: dict[str, Any] = {
            "index": 0,
            "text": answer.content,
            "logprobs": Logprobs().of(answer.logprobs) if request.logprobs else None,
            "finish_reason": answer.finish_reason,
        }
        if request.token_ids:
            choice |= {"token_ids": answer.token_ids, "prompt_token_ids": answer.prompt_ids}
        head = _head(answer.step_id, answer.created, answer.model)
        return msgspec.json.encode(head | {"choices": [choice], "usage": usage(answer.usage)})

    def writer(
        self, request: Request, step_id: str, created: int, model: str
    ) -> "CompletionsWriter":
        return CompletionsWriter(request, step_id, created, model)


class CompletionsWriter:
    """One streamed completion."""

    def __init__(self, request: Request, step_id: str, created: int, model: str) -> None:
        self._request = request
        self._head = _head(step_id, created, model)
        self._logprobs = Logprobs()

    def begin(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        choice: dict[str, Any] = {"index": 0, "text": delta.content, "finish_reason": None}
        choice["logprobs"] = self._logprobs.of(delta.logprobs) if self._request.logprobs else None
        if self._request.token_ids:
            choice["token_ids"] = delta.token_ids
        return self._chunk(choices=[choice])

    def end(self, answer: Answer) -> bytes:
        last: dict[str, Any] = {"index": 0, "text": "", "logprobs": None}
        last["finish_reason"] = answer.finish_reason
        if self._request.token_ids:
            last["prompt_token_ids"] = answer.prompt_ids
        events = self._chunk(choices=[last])
        if self._request.include_usage:
            events += self._chunk(choices=[], usage=usage(answer.usage))
        return events + DONE

    def error(self, message: str, kind: str) -> bytes:
        about = {"message": message, "type": kind, "param": None, "code": None}
        return event(msgspec.json.encode({"error": about}))

    def _chunk(self, **told: Any) -> bytes:
        return event(msgspec.json.encode(self._head | told))


class Logprobs:
    """Logprobs in the shape of this route, with offsets that go on from one chunk to the next."""

    def __init__(self) -> None:
        self._offset = 0

    def of(self, tokens: list[TokenLogprob]) -> dict[str, list[Any]]:
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
    """The sampled token is always among them, also when it is not one of the likeliest."""
    return {other.token: other.logprob for other in token.top} | {token.token: token.logprob}


def _head(step_id: str, created: int, model: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{step_id}",
        "object": "text_completion",
        "created": created,
        "model": model,
    }


def _refuse_what_is_not_served(asked: CompletionsBody) -> None:
    if asked.echo:
        raise BadRequest(
            "echo is not served: the answer holds only what was generated", param="echo"
        )
    if asked.best_of is not None and asked.best_of > 1:
        raise BadRequest(
            "best_of must be 1: open a trajectory for each sample and choose among them",
            param="best_of",
        )
    if asked.suffix:
        raise BadRequest(
            "suffix is not served: text is generated behind the prompt", param="suffix"
        )
    if (asked.logprobs or 0) > MAX_TOP_LOGPROBS:
        raise BadRequest(f"logprobs is at most {MAX_TOP_LOGPROBS}", param="logprobs")


def _prompt(prompt: str | list[Any]) -> str | list[int]:
    """One prompt; clients also send it as a list of one."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if not prompt:
        raise BadRequest("prompt must not be empty", param="prompt")
    if isinstance(prompt, str) or all(_is_id(one) for one in prompt):
        return prompt
    raise BadRequest(ONE_PROMPT, param="prompt")


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31
