"""A collector of OpenTelemetry traces: takes what SDKs send over HTTP, and keeps it for a test."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class SeenSpan(NamedTuple):
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    links: list[str]
    """The span_ids that it leads to."""
    events: list[str]
    about: dict[str, Any]
    is_failed: bool


class Collector:
    def __init__(self, port: int = 0) -> None:
        self.spans: list[SeenSpan] = []
        self.bodies: list[bytes] = []
        """As they came: what is nowhere in them was not told."""
        seen = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                seen.take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(part.resource.attributes)["service.name"]
            for scope in part.scope_spans:
                self.spans += [_seen(service, span) for span in scope.spans]

    def named(self, name: str, **about: Any) -> list[SeenSpan]:
        """Those with this name and these attributes of ours."""
        wanted = {f"steplog.{key}": value for key, value in about.items()}
        return [s for s in self.spans if s.name == name and wanted.items() <= s.about.items()]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def running_collector(port: int = 0) -> Iterator[Collector]:
    collector = Collector(port)
    try:
        yield collector
    finally:
        collector.close()


def _seen(service: str, span: Any) -> SeenSpan:
    return SeenSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        links=[link.span_id.hex() for link in span.links],
        events=[event.name for event in span.events],
        about=_values(span.attributes),
        is_failed=span.status.code == 2,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in attributes}
