"""Traces: services record spans of their work here, and `servicekit.otel` exports them.

Traces are off until `start` turns them on: then the tracer of `servicekit.otel` replaces the no-op one.
So services create spans without checking whether traces are on.

A record of the log has the `traceparent` of the span that wrote it in its Kafka headers. Not in the
record itself, which is the same with and without traces.
"""

from collections.abc import Sequence
from typing import Any

from servicekit.distribution import install_command
from servicekit.errors import Fatal
from servicekit.spans import TRACEPARENT, Kind, Span, Tracer

OFF = Tracer()
_tracer = OFF


def start(service: str, is_wanted: bool) -> None:
    """Turns traces on if `is_wanted`; the OTEL_… variables say where spans go. Raises Fatal if the
    package is not installed."""
    global _tracer
    if not is_wanted:
        return
    try:
        from servicekit import otel
    except ModuleNotFoundError as error:
        raise Fatal(f"Traces need the package {error.name}: {install_command('otel')}") from error
    _tracer = otel.open_tracer(service)


def stop() -> None:
    """Sends the ended spans, and turns traces off."""
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
    **attributes: Any,
) -> Span:
    """Begins a span. `parent` and `links` are traceparents; the default parent is the current span."""
    return _tracer.span(name, kind, parent, links, **attributes)


def current() -> Span:
    """The innermost span that this task or thread has entered."""
    return _tracer.current()


def headers(traceparent: str) -> list[tuple[str, bytes]]:
    """The Kafka headers of a record."""
    return [(TRACEPARENT, traceparent.encode())] if traceparent else []


def traceparent_of(headers: Any) -> str:
    """The traceparent in a record's Kafka headers; empty if there is none. Any producer may have
    written them, so nothing about them is trusted."""
    for name, value in headers or ():
        if name == TRACEPARENT and isinstance(value, bytes):
            return value.decode("ascii", "replace")
    return ""
