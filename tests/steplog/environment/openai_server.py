"""Any OpenAI-style server: it says what `answer` makes of the messages, whole or in chunks."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
Say = Callable[[list[Json]], str]


class Refusal(Exception):
    """Raised by `answer`: what the server refuses a call with."""

    def __init__(self, status: int, **error: Any) -> None:
        self.status, self.body = status, {"error": {"message": "no", "code": None, **error}}


OVERFLOW = {"code": "context_length_exceeded", "message": "too long"}
"""What a gateway says of a prompt that does not fit into the context."""


def chunks(text: str) -> Iterator[Json]:
    for letter in text:
        yield {"choices": [{"index": 0, "delta": {"content": letter}}]}
    yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    yield {"choices": [], "usage": {"completion_tokens": len(text)}}


@contextmanager
def running_server(say: Say, fingerprint: Callable[[], str | None] = lambda: None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            try:
                text = say(body["messages"])
            except Refusal as refusal:
                self._send("application/json", json.dumps(refusal.body), refusal.status)
                return
            if body.get("stream"):
                events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks(text)]
                self._send("text/event-stream", "".join(events) + "data: [DONE]\n\n")
                return
            message = {"role": "assistant", "content": text}
            told: Json = {"id": "a1", "object": "chat.completion", "created": 0, "model": "any"}
            told["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
            told["usage"] = {"prompt_tokens": 1, "completion_tokens": len(text), "total_tokens": 1}
            told["system_fingerprint"] = fingerprint()
            self._send("application/json", json.dumps(told))

        def _send(self, kind: str, body: str, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
