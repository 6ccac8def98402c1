"""Spans of our own work, for whoever collects OpenTelemetry traces.

Traces are off until `start` is asked for them: then `servicekit.otel`, the one module that knows the
package, takes the place of the no-op Tracer. So services write
spans down without asking whether anybody wants them.

A record of the log carries the `traceparent` of the span that wrote it in its Kafka headers. Headers,
since it says nothing about what was generated: a record is the same with traces and without.
"""

from collections.abc import Sequence
from typing import Any

from servicekit.distribution import install_command
from servicekit.errors import Fatal
from servicekit.spans import TRACEPARENT, Kind, Span, Tracer

OFF = Tracer()
_tracer = OFF


def start(service: str, is_wanted: bool) -> None:
    """Where spans go is said by the OTEL_… variables. Raises Fatal without the package."""
    global _tracer
    if not is_wanted:
        return
    try:
        from servicekit import otel
    except ModuleNotFoundError as error:
        raise Fatal(f"Traces need the package {error.name}: {install_command('otel')}") from error
    _tracer = otel.open_tracer(service)


def stop() -> None:
    """Sends what has ended, and records nothing more."""
    global _tracer
    _tracer.close()
    _tracer = OFF


def is_enabled() -> bool:
    return _tracer is not OFF


def span(
    name: str,
    kind: Kind = "internal",
    parent: str | None = None,
    links: Sequence[str] = (),
    **about: Any,
) -> Span:
    """Begins now. `parent` and `links` are traceparents; without a parent it is the current span."""
    return _tracer.span(name, kind, parent, links, **about)


def current() -> Span:
    """The innermost span that was entered here."""
    return _tracer.current()


def headers(traceparent: str) -> list[tuple[str, bytes]]:
    """What a record of the log carries."""
    return [(TRACEPARENT, traceparent.encode())] if traceparent else []


def traceparent_of(headers: Any) -> str:
    """What a record carries, as a Kafka client gives it; anybody may have written it."""
    for name, value in headers or ():
        if name == TRACEPARENT and isinstance(value, bytes):
            return value.decode("ascii", "replace")
    return ""
