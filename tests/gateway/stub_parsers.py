"""The part of the stub engine that reads ids: vLLM's `render` and `derender`, with a small parser."""

import codecs
import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from secrets import token_hex
from typing import Any

from tests.tiny_model import IDS

CALL = re.compile(r'(?s)<tool_call>\s*{"name":\s*"(.*?)",\s*"arguments":\s*(.*?)}\s*</tool_call>')
NAMES = {number: name for name, number in IDS.items()}
Json = dict[str, Any]
Seen = tuple[str, list[tuple[str, str]]]


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status = status
        kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": status}}


def usage(prompt: int, completion: int) -> Json:
    total = prompt + completion
    return {"prompt_tokens": prompt, "total_tokens": total, "completion_tokens": completion}


def render(body: bytes) -> Json:
    """The part of vLLM's answer that says what holds the model to a tool call."""
    chat: Json = json.loads(body)
    forced = chat.get("tools") and chat.get("tool_choice") not in (None, "auto", "none")
    tag = {"structural_tag": json.dumps({"choice": chat["tool_choice"]})} if forced else None
    return {"token_ids": [0], "sampling_params": {"structured_outputs": tag}}


def derender(model: str, body: bytes) -> Json:
    """Ids into messages, with a small hermes parser, which streams a call when it is complete."""
    request: Json = json.loads(body)
    stream = bool(request.get("stream"))
    for name in ("chat_request", "prompt_token_ids") if stream else ("chat_request",):
        if request.get(name) is None:
            raise Refused(400, f"{name} is required when a tool parser is configured")
    chat = request["chat_request"]
    tools = bool(chat.get("tools")) and chat.get("tool_choice") != "none"
    return (_derender_chunk if stream else _derender_whole)(model, request, tools)


def _derender_whole(model: str, request: Json, tools: bool) -> Json:
    response = request["generate_response"]
    choices = []
    for choice in response["choices"]:
        if not choice.get("token_ids"):
            raise Refused(400, f"choice {choice['index']} has empty or null token_ids")
        ending = _ending({"finish_reason": "stop"} | choice)
        choices.append(ending | {"message": _message(choice["token_ids"], tools)})
    head = {"id": response.get("request_id", "stub"), "object": "chat.completion"}
    head |= {"created": int(time.time()), "model": model, "choices": choices}
    completion = sum(len(choice["token_ids"]) for choice in response["choices"])
    return head | {"usage": usage(request.get("prompt_tokens") or 0, completion)}


def _ending(choice: Json) -> Json:
    names = ("index", "finish_reason", "stop_reason")
    return {name: choice.get(name) for name in names} | {"logprobs": None}


def _message(ids: Sequence[int], tools: bool) -> Json:
    content, found = _seen(ids, tools)
    message: Json = {"role": "assistant", "content": text_of(ids), "reasoning": None}
    with suppress(json.JSONDecodeError):
        calls = [(name, json.dumps(json.loads(arguments))) for name, arguments in found]
        if calls:
            entries = [_tool_call(token_hex(8), *call) for call in calls]
            message |= {"content": content or None, "tool_calls": entries}
    return message


def _tool_call(identity: str | None, name: str | None, arguments: str | None) -> Json:
    kind = "function" if identity else None
    return {"id": identity, "type": kind, "function": {"name": name, "arguments": arguments}}


def _derender_chunk(model: str, request: Json, tools: bool) -> Json:
    """The difference between what the ids said before this chunk and what they say with it."""
    chunk, state = request["generate_chunk"], request.get("stream_state") or {}
    ids: list[int] = state.get("output_token_ids", [])
    sent = bool(state.get("role_sent"))
    choices = []
    for choice in chunk["choices"]:
        before, ids = _seen(ids, tools), ids + (choice.get("token_ids") or [])
        now = _seen(ids, tools)
        delta = {"role": None if sent else "assistant"} | _delta(before, now)
        choices.append(_ending(choice) | {"delta": delta})
        if choice.get("finish_reason") and now[1]:
            choices[-1]["finish_reason"] = "tool_calls"
    head = {"id": chunk.get("request_id", "stub"), "object": "chat.completion.chunk"}
    head |= {"created": int(time.time()), "model": model, "usage": chunk.get("usage")}
    state = {"output_token_ids": ids, "role_sent": sent or bool(choices)}
    return {"chunk": head | {"choices": choices}, "stream_state": state}


def _delta(before: Seen, now: Seen) -> Json:
    delta: Json = {"content": now[0][len(before[0]) :] or None, "reasoning": None}
    entries = []
    for place in range(len(before[1]), len(now[1])):
        name, arguments = now[1][place]
        # Two entries of the same call, as vLLM writes them when a chunk holds both.
        entries.append({"index": place} | _tool_call(f"chatcmpl-tool-{token_hex(8)}", name, None))
        entries.append({"index": place} | _tool_call(None, None, arguments))
    return delta | {"tool_calls": entries} if entries else delta


def _seen(ids: Sequence[int], tools: bool) -> Seen:
    """The content so far, and the name and arguments of each complete call."""
    text = text_of(ids)
    return (text.partition("<tool_call>")[0], CALL.findall(text)) if tools else (text, [])


def text_of(ids: Sequence[int]) -> str:
    """Half a character at the end is left out, as it may be completed."""
    raw = b"".join(NAMES[number].encode() if number in NAMES else bytes([number]) for number in ids)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)
