"""Export of traces with OpenTelemetry: the only module that imports it, itself imported only when
traces are on.

The SDK sends spans in its own thread from a bounded queue: a collector that is slow or unavailable
costs spans, never work. This is logged once when it begins and once when it is over. A killed process
loses the spans of its last seconds; the records that they describe are in the log.
"""

import atexit
import logging
from collections.abc import Sequence
from threading import Thread
from types import TracebackType
from typing import Any, Self

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from servicekit import distribution
from servicekit.masking import LOGIN
from servicekit.spans import TRACEPARENT, Kind, Span, Tracer

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 3.0
"""Seconds that an ending process waits for unsent spans."""
MAX_LINKS = 128
"""Links of one span. It is the SDK's own limit, but the SDK would keep the last ones, not the first."""
KINDS = {kind.name.lower(): kind for kind in trace.SpanKind}
NAMES = {
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
    "operation": "gen_ai.operation.name",
    "request_model": "gen_ai.request.model",
    "response_model": "gen_ai.response.model",
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "engine": "server.address",
    "system": "messaging.system",
    "topic": "messaging.destination.name",
    "partition": "messaging.destination.partition.id",
    "offset": "messaging.kafka.offset",
    "group": "messaging.consumer.group.name",
    "messaging": "messaging.operation.name",
    "messaging_type": "messaging.operation.type",
}
"""Attributes with a name in OpenTelemetry's conventions; all others become `steplog.…`."""
_propagator = TraceContextTextMapPropagator()


class RecordedSpan(Span):
    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._token: Any = None

    @property
    def traceparent(self) -> str:  # type: ignore[override]
        ids = self._span.get_span_context()
        if not ids.is_valid:
            return ""
        return f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{int(ids.trace_flags):02x}"

    def __enter__(self) -> Self:
        self._token = context.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        context.detach(self._token)
        if kind is not None:
            self.fail(kind.__name__)
        self.end()

    def set_attributes(self, **attributes: Any) -> None:
        if self._span.is_recording():  # a call may outlive its request's span
            self._span.set_attributes(_attributes(attributes))

    def event(self, name: str) -> None:
        if self._span.is_recording():
            self._span.add_event(name)

    def fail(self, kind: str) -> None:
        if self._span.is_recording():
            self._span.set_attribute("error.type", kind)
            self._span.set_status(trace.StatusCode.ERROR)

    def end(self) -> None:
        self._span.end()


class RecordingTracer(Tracer):
    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("steplog", distribution.version())

    def span(
        self,
        name: str,
        kind: Kind = "internal",
        parent: str | None = None,
        links: Sequence[str] = (),
        **attributes: Any,
    ) -> Span:
        span = self._tracer.start_span(
            name,
            None if parent is None else _context(parent),
            KINDS[kind],
            _attributes(attributes),
            [trace.Link(_span_context(link)) for link in links[:MAX_LINKS]],
        )
        return RecordedSpan(span)

    def current(self) -> Span:
        return RecordedSpan(trace.get_current_span())

    def close(self) -> None:
        """In a thread, since the SDK would wait without limit for a collector that is unavailable."""
        atexit.unregister(self.close)
        shutdown = Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        shutdown.start()
        shutdown.join(SHUTDOWN_TIMEOUT_S)


def open_tracer(service: str) -> Tracer:
    defaults = {"service.name": f"steplog-{service}", "service.version": distribution.version()}
    # The OTEL_… variables take precedence.
    resource = Resource.create(defaults).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(QuietExporter(OTLPSpanExporter())))
    tracer = RecordingTracer(provider)
    atexit.register(tracer.close)
    return tracer


class QuietExporter(SpanExporter):
    """Logs once that the collector is unavailable, where the SDK would log it for every batch."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter = exporter
        self._endpoint = LOGIN.sub("***", str(exporter._endpoint))
        self._is_unavailable = False
        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_unavailable = result is not SpanExportResult.SUCCESS
        if is_unavailable and not self._is_unavailable:
            log.warning(
                "Traces cannot be sent to %s; they are lost until they can.", self._endpoint
            )
        elif self._is_unavailable and not is_unavailable:
            log.info("Traces are sent to %s again.", self._endpoint)
        self._is_unavailable = is_unavailable
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        NAMES.get(name, f"steplog.{name}"): value
        for name, value in attributes.items()
        if value is not None
    }


def _context(traceparent: str) -> context.Context:
    """The context of a span in another process. An unreadable traceparent starts a new trace."""
    return _propagator.extract({TRACEPARENT: traceparent}, context.Context())


def _span_context(traceparent: str) -> trace.SpanContext:
    return trace.get_current_span(_context(traceparent)).get_span_context()
