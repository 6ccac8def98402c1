"""An engine without a model: it says what it was told to say, fast, or fails the way it was told to.

It speaks the routes of vLLM that the gateway calls, in the shapes that vLLM 0.32 was seen to use, its
oddities included (a parsed tool call does not change the finish reason, an end marker that is not
cut off comes out as text). The tokens are those of `tests.tiny_model`.

    POST /stub/script     answers to give, in order; then every call gets the same tokens again
    POST /stub/release    what is held goes out
    POST /stub/version    {"version": "1.3"}, the weights that it claims to have
    POST /stub/health     {"status": 503}
    POST /stub/pause      {"paused": true}
    POST /stub/reset      all of the above as it was at the start, or with a version
    GET  /stub/requests   the last bodies that came to /inference/v1/generate, since the reset
    GET  /stub/cancelled  how many of them were left by their client before the answer was out
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests import processes
from tests.gateway.stub_parsers import Json, Refused, derender, render, usage
from tests.tiny_model import EOS

HOST = "127.0.0.1"
MODEL = "tiny"
TOKENS = 128
PRINTABLE = bytes(range(0x20, 0x7F))
START_LIMIT_S = 60.0
POLL_S = 0.02
REQUESTS_KEPT = 1000
GARBAGE = b"<html>not what you asked for</html>"
FAULTS = r"^(|before|hang|overflow|status:[45]\d\d|error|garbage|cut|logprob_count)$"
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

encode = msgspec.json.encode


class Answer(msgspec.Struct, forbid_unknown_fields=True, eq=False):
    """What one generate call gets. After `hold` chunks it waits until it is released; of an answer that
    is no stream, and with 0 of any, nothing goes out before. The faults, which come after the delay:

    before         the connection is closed without a byte
    hang           no byte ever
    status:500     that status, with vLLM's body for errors
    overflow       the prompt is too long for the model, in vLLM's words
    error          the engine dies under the call: 500, or in a stream an event after the tokens
    garbage        no JSON
    cut            the connection is closed in the middle of the body
    logprob_count  one log-prob too few
    """

    ids: list[int]
    logprobs: list[float] | None = None
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    delay: float = 0.0
    chunk_delay: float = 0.0
    chunk: int = 1
    hold: int | None = None
    weight_versions: list[Json] | None = None
    fault: Annotated[str, msgspec.Meta(pattern=FAULTS)] = ""


class _Asked(msgspec.Struct):
    """The part of a generate request that changes the answer. The prompt stays raw: it is long."""

    token_ids: msgspec.Raw
    sampling_params: Json
    model: str | None = None
    request_id: str = "stub"
    stream: bool = False
    stream_options: Json | None = None


class _Protocol(HttpToolsProtocol):
    """ASGI has no word for hanging up, so the application gets the connection itself."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self.transport


@dataclass(frozen=True)
class _Call:
    scope: Message
    receive: Receive
    send: Send

    async def body(self) -> bytes:
        parts = []
        while True:
            message = await self.receive()
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)

    async def start(self, status: int, kind: str, length: int | None = None) -> None:
        headers = [(b"content-type", kind.encode())]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, more: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    async def answer(self, status: int, body: bytes) -> None:
        await self.start(status, "application/json", len(body))
        await self.write(body)

    async def left(self, seconds: float | None) -> bool:
        """Waits, and says whether the client went away meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                while (await self.receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            return False
        return True

    async def hang_up(self) -> None:
        self.scope["state"]["connection"].close()
        await self.left(None)


class Stub:
    """The ASGI application."""

    def __init__(self, model: str, tokens: int) -> None:
        self._model = model
        self._version = "default"
        self._health = 200
        self._paused = False
        self._cancelled = 0
        self._bodies: deque[bytes] = deque(maxlen=REQUESTS_KEPT)
        self._released = asyncio.Event()
        self._script: deque[Answer] = deque()
        self._usual = Answer(ids=[*(PRINTABLE * tokens)[: tokens - 1], EOS])
        self._routes: dict[str, Callable[[bytes], Json]] = {
            "/v1/models": self._models,
            "/weight_info": lambda _: {"weight_version": self._version},
            "/is_paused": lambda _: {"is_paused": self._paused},
            "/v1/chat/completions/render": render,
            "/v1/chat/completions/derender": partial(derender, model),
            "/stub/script": self._set_script,
            "/stub/release": self._release,
            "/stub/version": self._set_version,
            "/stub/health": self._set_health,
            "/stub/pause": self._set_paused,
            "/stub/reset": self._reset,
            "/stub/requests": lambda _: {"requests": [json.loads(body) for body in self._bodies]},
            "/stub/cancelled": lambda _: {"cancelled": self._cancelled},
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        call = _Call(scope, receive, send)
        path = scope["path"]
        try:
            if path == "/inference/v1/generate":
                await self._generate(call, await call.body())
            elif path == "/health":
                await call.answer(self._health, b"")
            elif path in self._routes:
                await call.answer(200, encode(self._routes[path](await call.body())))
            else:
                await call.answer(404, b'{"detail":"Not Found"}')
        except Refused as refused:
            await call.answer(refused.status, encode(refused.body))
        except msgspec.DecodeError as error:
            await call.answer(400, encode(Refused(400, str(error)).body))

    def _models(self, _: bytes) -> Json:
        model = {
            "id": self._model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
        }
        model |= {"root": self._model, "parent": None, "max_model_len": 1024, "permission": []}
        return {"object": "list", "data": [model]}

    def _set_script(self, body: bytes) -> Json:
        self._script.extend(msgspec.json.decode(body, type=list[Answer]))
        return {"waiting": len(self._script)}

    def _release(self, _: bytes) -> Json:
        self._released.set()
        self._released = asyncio.Event()
        return {}

    def _set_version(self, body: bytes) -> Json:
        self._version = str(json.loads(body)["version"])
        return {"version": self._version}

    def _set_health(self, body: bytes) -> Json:
        self._health = int(json.loads(body)["status"])
        return {"status": self._health}

    def _set_paused(self, body: bytes) -> Json:
        self._paused = bool(json.loads(body)["paused"])
        return {"paused": self._paused}

    def _reset(self, body: bytes) -> Json:
        self._version = str(json.loads(body).get("version", "default"))
        self._health, self._paused = 200, False
        self._script.clear()
        self._bodies.clear()
        return self._release(body)

    async def _generate(self, call: _Call, body: bytes) -> None:
        self._bodies.append(body)
        asked = msgspec.json.decode(body, type=_Asked)
        if asked.model not in (None, self._model):
            raise Refused(404, f"The model `{asked.model}` does not exist.")
        answer = self._next(asked)
        if await self._left_before(call, asked, answer):
            self._cancelled += 1
        elif answer.fault == "before":
            await call.hang_up()
        elif answer.fault == "hang":
            self._cancelled += await call.left(None)
        elif answer.fault.startswith("status:"):
            raise Refused(int(answer.fault.removeprefix("status:")), "the script says so")
        elif answer.fault == "overflow":
            raise Refused(400, "This model's maximum context length is 1024 tokens, not 1025.")
        elif asked.stream:
            await self._stream(call, asked, answer)
        else:
            await self._whole(call, asked, answer)

    async def _left_before(self, call: _Call, asked: _Asked, answer: Answer) -> bool:
        if answer.delay and await call.left(answer.delay):
            return True
        is_held = answer.hold is not None and not (asked.stream and answer.hold)
        return is_held and await self._left_while_held(call)

    async def _left_while_held(self, call: _Call) -> bool:
        released = asyncio.create_task(self._released.wait())
        left = asyncio.create_task(call.left(None))
        await asyncio.wait((released, left), return_when=asyncio.FIRST_COMPLETED)
        released.cancel()
        left.cancel()
        return left.done()

    def _next(self, asked: _Asked) -> Answer:  # noqa: ARG002
        return self._script.popleft() if self._script else self._usual

    async def _whole(self, call: _Call, asked: _Asked, answer: Answer) -> None:
        if answer.fault == "error":
            raise Refused(500, "EngineCore encountered an issue.")
        head: Json = {"request_id": f"generate-tokens-{asked.request_id}", "model": self._model}
        head |= {"created": int(time.time()), "usage": _usage(asked, answer)}
        (rest,) = self._parts(asked, answer)
        body = GARBAGE if answer.fault == "garbage" else encode(head)[:-1] + rest
        if answer.fault == "cut":
            await call.start(200, "application/json", len(body))
            await call.write(body[: len(body) // 2], more=True)
            await call.hang_up()
        else:
            await call.answer(200, body)

    async def _stream(self, call: _Call, asked: _Asked, answer: Answer) -> None:
        await call.start(200, "text/event-stream; charset=utf-8")
        events = self._events(asked, answer)
        if answer.fault == "cut":
            events = [*events[: len(events) // 2], b'data: {"requ']
        if not answer.chunk_delay and not answer.hold:
            # One write: nobody waits between the chunks, and many small ones are what is slow here.
            events = [b"".join(events)]
        for place, event in enumerate(events):
            if place and await self._left_between(call, answer, place):
                self._cancelled += 1
                return
            await call.write(event, more=True)
        await (call.hang_up() if answer.fault == "cut" else call.write(b""))

    async def _left_between(self, call: _Call, answer: Answer, place: int) -> bool:
        if place == answer.hold:
            return await self._left_while_held(call)
        return bool(answer.chunk_delay) and await call.left(answer.chunk_delay)

    def _events(self, asked: _Asked, answer: Answer) -> list[bytes]:
        head = {"request_id": f"generate-tokens-{asked.request_id}"}
        start = b"data: " + encode(head | {"usage": None})[:-1]
        events = [start + part + b"\n\n" for part in self._parts(asked, answer)]
        if answer.fault == "garbage":
            events = [b"data: " + GARBAGE + b"\n\n"]
        elif answer.fault == "error":
            died = Refused(500, "EngineCore encountered an issue.")
            events[-1] = b"data: " + encode(died.body) + b"\n\n"
        elif asked.stream_options and asked.stream_options.get("include_usage"):
            last = {"usage": _usage(asked, answer), "output_mode": "tokens", "choices": []}
            events.append(b"data: " + encode(head | last) + b"\n\n")
        return [*events, b"data: [DONE]\n\n"]

    def _parts(self, asked: _Asked, answer: Answer) -> list[bytes]:
        """What follows the head of an answer, which is where its request's own values are."""
        logprobs = asked.sampling_params.get("logprobs") is not None
        return _encoded(answer, asked.stream, logprobs, self._version)


# An answer is its own key: the usual one is encoded once for each way to ask.
@lru_cache(maxsize=32)
def _encoded(answer: Answer, stream: bool, logprobs: bool, version: str) -> list[bytes]:
    fields: Json = {"output_mode": "tokens"}
    if not stream:
        absent = "prompt_logprobs prompt_token_id_logprobs prompt_token_ids mm_placeholders metrics"
        names = [*absent.split(), "kv_transfer_params", "ec_transfer_params"]
        fields = dict.fromkeys(names) | fields
    size = answer.chunk if stream else max(len(answer.ids), 1)
    return [
        # Without the brace: it goes on where a head was.
        b"," + encode(fields | {"choices": [_choice(answer, start, size, logprobs, version)]})[1:]
        for start in range(0, max(len(answer.ids), 1), size)
    ]


def _choice(answer: Answer, start: int, size: int, logprobs: bool, version: str) -> Json:
    last = start + size >= len(answer.ids)
    whole = [{"version": version, "start": 0, "end": len(answer.ids)}]
    return {
        "index": 0,
        "finish_reason": answer.finish_reason if last else None,
        "stop_reason": answer.stop_reason if last else None,
        "token_ids": answer.ids[start : start + size],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": (answer.weight_versions or whole) if last else None,
        "logprobs": {"content": _logprobs(answer)[start : start + size]} if logprobs else None,
    }


def _logprobs(answer: Answer) -> list[Json]:
    # Each place has its own value, and one that JSON keeps exactly: a shifted list shows.
    values = answer.logprobs or [-(place + 1) / 1024 for place in range(len(answer.ids))]
    if answer.fault == "logprob_count":
        values = values[:-1]
    tops = [
        {"token_id": number, "logprob": value, "rank": 1}
        for number, value in zip(answer.ids, values, strict=False)
    ]
    return [{**top, "top_logprobs": [top]} for top in tops]


def _usage(asked: _Asked, answer: Answer) -> Json:
    return usage(bytes(asked.token_ids).count(b",") + 1, len(answer.ids))


class StubEngine:
    """A running stub, seen from a test."""

    def __init__(self, port: int, process: "subprocess.Popen[bytes]") -> None:
        self.url = f"http://{HOST}:{port}"
        self.port = port
        self.process = process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def script(self, answers: Sequence[Json]) -> None:
        """Each is an object with the fields of `Answer`."""
        self._ask("/stub/script", list(answers))

    def waiting(self) -> int:
        """Answers of the script that no call has taken yet."""
        return int(self._ask("/stub/script", [])["waiting"])

    def release(self) -> None:
        """Answers that are held go out."""
        self._ask("/stub/release", {})

    def set_version(self, version: str) -> None:
        self._ask("/stub/version", {"version": version})

    def set_health(self, status: int) -> None:
        self._ask("/stub/health", {"status": status})

    def set_paused(self, paused: bool) -> None:
        self._ask("/stub/pause", {"paused": paused})

    def reset(self, version: str = "default") -> None:
        """What a failed test left in it is gone."""
        self._ask("/stub/reset", {"version": version})

    def requests(self) -> list[Json]:
        return list(self._ask("/stub/requests")["requests"])

    def cancelled(self) -> int:
        return int(self._ask("/stub/cancelled")["cancelled"])

    def _ask(self, path: str, body: object = None) -> Json:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(self.url + path, data, timeout=60) as response:
            return dict(json.load(response))


@contextmanager
def running_stub(tokens: int = TOKENS, model: str = MODEL, port: int = 0) -> Iterator[StubEngine]:
    """A stub as a process of its own; give it the port of a killed one to have that one back."""
    # Here, because the stub itself shall not wait for what the fixtures import.
    from tests.conftest import free_port

    port = port or free_port()
    command = [sys.executable, "-m", "tests.gateway.stub_engine", "--port", str(port)]
    command += ["--tokens", str(tokens), "--model", model]
    engine = StubEngine(port, processes.Popen(command, cwd=Path(__file__).parents[2]))
    try:
        _wait_until_up(engine)
        yield engine
    finally:
        engine.kill()


def _wait_until_up(engine: StubEngine) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while engine.process.poll() is None and time.monotonic() < deadline:
        try:
            engine.cancelled()
            return
        except OSError:
            time.sleep(POLL_S)
    raise RuntimeError("the stub engine did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--model", default=MODEL)
    options = parser.parse_args()
    uvicorn.run(
        Stub(options.model, options.tokens),
        host=HOST,
        port=options.port,
        loop="uvloop",
        http=_Protocol,
        lifespan="off",
        log_level="error",
        access_log=False,
    )


if __name__ == "__main__":
    main()
