"""Transcripts: requests and answers on any of OpenAI's routes, as chat messages.

Agents use whichever route they like; pages and statistics need only this one form.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Json = dict[str, Any]


class Transcript(NamedTuple):
    messages: Sequence[Json]
    answer: Json
    finish_reason: str | None
    tokens: int
    """Generated tokens, as the server counts them; 0 if it does not say."""
    prompt_tokens: int
    answer_id: str
    versions: tuple[str, ...]
    """The versions of the weights that answered; empty if the server does not say."""


def transcribe(path: str, request: Json, answer: Json | tuple[Json, ...]) -> Transcript:
    """`answer` is the response's body, or its events if it was streamed."""
    join_events, read = next(rules for route, rules in ROUTES.items() if path.endswith(route))
    return read(request, join_events(answer) if isinstance(answer, tuple) else answer)


def is_transcribed(path: str) -> bool:
    return path.endswith(tuple(ROUTES))


def parse_events(stream: str) -> tuple[Json, ...]:
    lines = (line.removeprefix("data:").strip() for line in stream.splitlines())
    return tuple(json.loads(line) for line in lines if line.startswith("{"))


def _read_chat(request: Json, response: Json) -> Transcript:
    choice = response["choices"][0]
    finish_reason = choice.get("finish_reason")
    return Transcript(request["messages"], choice["message"], finish_reason, *_counts(response))


def _counts(
    response: Json, output: str = "completion", prompt: str = "prompt"
) -> tuple[int, int, str, tuple[str, ...]]:
    """Generated tokens, tokens of the prompt, the answer's id, and the versions of the weights."""
    usage = response.get("usage") or {}
    tokens, prompt_tokens = (int(usage.get(f"{name}_tokens") or 0) for name in (output, prompt))
    fingerprint = str(response.get("system_fingerprint") or "")
    versions = tuple(fingerprint.split(",")) if fingerprint else ()
    return tokens, prompt_tokens, str(response.get("id") or ""), versions


def _join_chat(chunks: Sequence[Json]) -> Json:
    message: Json = {"role": "assistant", "content": ""}
    finish = None
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            _add_delta(message, choice["delta"])
            finish = choice.get("finish_reason") or finish
    return _head(chunks) | {"choices": [{"message": message, "finish_reason": finish}]}


def _head(chunks: Sequence[Json]) -> Json:
    """What the chunks say about the whole answer, each field from the last one that has it."""
    names = ("id", "usage", "system_fingerprint")
    return {name: chunk[name] for chunk in chunks for name in names if chunk.get(name)}


def _add_delta(message: Json, delta: Mapping[str, Any]) -> None:
    for name in ("content", "reasoning", "reasoning_content"):
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    calls = message.setdefault("tool_calls", []) if delta.get("tool_calls") else []
    for part in delta.get("tool_calls") or ():
        while len(calls) <= part["index"]:
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        for name in ("name", "arguments"):
            calls[part["index"]]["function"][name] += part["function"].get(name) or ""


def _read_completion(request: Json, response: Json) -> Transcript:
    choice, prompt = response["choices"][0], request["prompt"]
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    messages = [{"role": "user", "content": text}]
    answer = {"role": "assistant", "content": choice["text"]}
    return Transcript(messages, answer, choice.get("finish_reason"), *_counts(response))


def _join_completion(chunks: Sequence[Json]) -> Json:
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    finish = next((c["finish_reason"] for c in choices if c.get("finish_reason")), None)
    text = "".join(choice.get("text") or "" for choice in choices)
    return _head(chunks) | {"choices": [{"text": text, "finish_reason": finish}]}


def _read_response(request: Json, response: Json) -> Transcript:
    content = request["input"]
    items = [{"role": "user", "content": content}] if isinstance(content, str) else content
    instructions = request.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    answer: Json = {"role": "assistant", "content": []}
    for part in map(_message, response["output"]):
        answer["content"] += part.get("content") or []
        answer |= {name: part[name] for name in ("reasoning",) if name in part}
        answer.setdefault("tool_calls", []).extend(part.get("tool_calls") or ())
    finish = "length" if response.get("status") == "incomplete" else "stop"
    counts = _counts(response, "output", "input")
    return Transcript([*system, *map(_message, items)], answer, finish, *counts)


def _message(item: Json) -> Json:
    match item.get("type"):
        case "function_call":
            return {"role": "assistant", "tool_calls": [{"function": item}]}
        case "function_call_output":
            return {"role": "tool", "content": item["output"]}
        case "reasoning":
            parts = [*(item.get("summary") or ()), *(item.get("content") or ())]
            return {"role": "assistant", "reasoning": "\n".join(part["text"] for part in parts)}
    return item


def _last_response(events: Sequence[Json]) -> Json:
    """The last event holds the whole response."""
    return next(event["response"] for event in reversed(events) if "response" in event)


JoinEvents = Callable[[Sequence[Json]], Json]
Read = Callable[[Json, Json], Transcript]
ROUTES: dict[str, tuple[JoinEvents, Read]] = {
    "/chat/completions": (_join_chat, _read_chat),
    "/completions": (_join_completion, _read_completion),
    "/responses": (_last_response, _read_response),
}
"""Routes by the end of their path; the first that fits is used."""
