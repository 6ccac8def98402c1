"""OpenTelemetry. Nothing else of ours imports the package, and nothing imports this without need.

Sending happens in the SDK's own thread, from a queue with a limit: a collector that is away or slow
costs spans, never work. That is said once when it begins and once when it is over. A process that is
killed loses the spans of its last seconds; what they told of is in the log.
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

LAST_WORDS = 3.0
"""Seconds that an ending process gives to what is not sent yet."""
MAX_LINKS = 128
"""Of one span; it is the SDK's own limit, which would keep the last ones and not the first."""
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
"""What OpenTelemetry's conventions have a name for; everything else is `steplog.…`."""
_propagator = TraceContextTextMapPropagator()


class RecordedSpan(Span):
    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._token: Any = None

    @property
    def traceparent(self) -> str:  # type: ignore[override]
        at = self._span.get_span_context()
        if not at.is_valid:
            return ""
        return f"00-{at.trace_id:032x}-{at.span_id:016x}-{int(at.trace_flags):02x}"

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
        **about: Any,
    ) -> Span:
        begun = self._tracer.start_span(
            name,
            None if parent is None else _context(parent),
            KINDS[kind],
            _attributes(about),
            [trace.Link(_named(link)) for link in links[:MAX_LINKS]],
        )
        return RecordedSpan(begun)

    def current(self) -> Span:
        return RecordedSpan(trace.get_current_span())

    def close(self) -> None:
        """In a thread, since the SDK waits for a collector that is away as long as that may take."""
        atexit.unregister(self.close)
        last = Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(LAST_WORDS)


def open_tracer(service: str) -> Tracer:
    own = {"service.name": f"steplog-{service}", "service.version": distribution.version()}
    # What the OTEL_… variables say of the resource goes over what we say.
    resource = Resource.create(own).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(QuietExporter(OTLPSpanExporter())))
    tracer = RecordingTracer(provider)
    atexit.register(tracer.close)
    return tracer


class QuietExporter(SpanExporter):
    """Says that the collector is away in one line, where the SDK says it for every batch."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter = exporter
        self._where = LOGIN.sub("***", str(exporter._endpoint))
        self._is_away = False
        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_away = result is not SpanExportResult.SUCCESS
        if is_away and not self._is_away:
            log.warning("traces cannot be sent to %s; until they can, they are lost", self._where)
        elif self._is_away and not is_away:
            log.info("traces are sent to %s again", self._where)
        self._is_away = is_away
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _attributes(about: dict[str, Any]) -> dict[str, Any]:
    known = {name: told for name, told in about.items() if told is not None}
    return {NAMES.get(name, f"steplog.{name}"): told for name, told in known.items()}


def _context(traceparent: str) -> context.Context:
    """Of a span elsewhere. What cannot be read names none: a new trace begins."""
    return _propagator.extract({TRACEPARENT: traceparent}, context.Context())


def _named(traceparent: str) -> trace.SpanContext:
    return trace.get_current_span(_context(traceparent)).get_span_context()
