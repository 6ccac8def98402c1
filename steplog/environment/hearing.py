"""What was asked and answered on each of OpenAI's routes, as messages of a chat.

Agents use whichever route they like; pages and statistics know one form of it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Json = dict[str, Any]


class Heard(NamedTuple):
    messages: Sequence[Json]
    answer: Json
    finish_reason: str | None
    tokens: int


def heard(path: str, asked: Json, stream: Sequence[Json] | None, told: Json | None) -> Heard:
    """`stream` are the events of an answer that came as such; else `told` is the answer."""
    join, read = next(how for route, how in ROUTES.items() if path.endswith(route))
    return read(asked, join(stream) if stream is not None else told or {})


def is_heard(path: str) -> bool:
    return path.endswith(tuple(ROUTES))


def events(stream: str) -> list[Json]:
    lines = (line.removeprefix("data:").strip() for line in stream.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def _chat(asked: Json, told: Json) -> Heard:
    choice = told["choices"][0]
    return Heard(
        asked["messages"], choice["message"], choice.get("finish_reason"), _completed(told)
    )


def _completed(told: Json) -> int:
    return int((told.get("usage") or {}).get("completion_tokens") or 0)


def _joined_chat(chunks: Sequence[Json]) -> Json:
    message: Json = {"role": "assistant", "content": ""}
    finish, usage = None, None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            _add(message, choice["delta"])
            finish = choice.get("finish_reason") or finish
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}


def _add(message: Json, delta: Mapping[str, Any]) -> None:
    for name in ("content", "reasoning", "reasoning_content"):
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    calls = message.setdefault("tool_calls", []) if delta.get("tool_calls") else []
    for part in delta.get("tool_calls") or ():
        while len(calls) <= part["index"]:
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        for name in ("name", "arguments"):
            calls[part["index"]]["function"][name] += part["function"].get(name) or ""


def _completion(asked: Json, told: Json) -> Heard:
    choice, prompt = told["choices"][0], asked["prompt"]
    question = prompt if isinstance(prompt, str) else json.dumps(prompt)
    answer = {"role": "assistant", "content": choice["text"]}
    messages = [{"role": "user", "content": question}]
    return Heard(messages, answer, choice.get("finish_reason"), _completed(told))


def _joined_completion(chunks: Sequence[Json]) -> Json:
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
    finish = next((c["finish_reason"] for c in choices if c.get("finish_reason")), None)
    text = "".join(choice.get("text") or "" for choice in choices)
    return {"choices": [{"text": text, "finish_reason": finish}], "usage": usage}


def _response(asked: Json, told: Json) -> Heard:
    given = asked["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    instructions = asked.get("instructions")
    first = [{"role": "system", "content": instructions}] if instructions else []
    answer: Json = {"role": "assistant", "content": []}
    for part in map(_message, told["output"]):
        answer["content"] += part.get("content") or []
        answer |= {name: part[name] for name in ("reasoning",) if name in part}
        answer.setdefault("tool_calls", []).extend(part.get("tool_calls") or ())
    finish = "length" if told.get("status") == "incomplete" else "stop"
    tokens = int((told.get("usage") or {}).get("output_tokens") or 0)
    return Heard([*first, *map(_message, items)], answer, finish, tokens)


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


def _last_response(stream: Sequence[Json]) -> Json:
    """The last event has all of it."""
    return next(event["response"] for event in reversed(stream) if "response" in event)


Join = Callable[[Sequence[Json]], Json]
Read = Callable[[Json, Json], Heard]
ROUTES: dict[str, tuple[Join, Read]] = {
    "/chat/completions": (_joined_chat, _chat),
    "/completions": (_joined_completion, _completion),
    "/responses": (_last_response, _response),
}
"""By the end of their path; of two that fit, the first is meant."""
