"""Spans of our own work, for whoever collects OpenTelemetry traces.

Traces are off until `start` is asked for them: then `pool.spans`, the one module that knows the
package, takes the place of the Tracer below, which does nothing and imports nothing. So services write
spans down without asking whether anybody wants them.

A record of the log carries the `traceparent` of the span that wrote it in its Kafka headers. Headers,
since it says nothing about what was generated: a record is the same with traces and without.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self

from pool.errors import Fatal

TRACEPARENT = "traceparent"
Kind = Literal["internal", "server", "client", "producer", "consumer"]


class Span:
    """A stretch of work. This one, of a process without traces, knows nothing and does nothing."""

    traceparent = ""
    """Names the span for others, as W3C's header does."""

    def __enter__(self) -> Self:
        """From here on it is the parent of what begins in the same task or thread."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def tell(self, **about: Any) -> None:
        """Adds attributes. Never what an agent or a model said, and no key."""

    def event(self, name: str) -> None:
        pass

    def fail(self, kind: str) -> None:
        """`kind` is the name of an error: its words may quote what an agent said."""

    def end(self) -> None:
        """For a span that is not used in a `with`: its work may end in another thread."""


class Tracer:
    def span(
        self,
        name: str,  # noqa: ARG002
        kind: Kind = "internal",  # noqa: ARG002
        parent: str | None = None,  # noqa: ARG002
        links: Sequence[str] = (),  # noqa: ARG002
        **about: Any,  # noqa: ARG002
    ) -> Span:
        return NOTHING

    def current(self) -> Span:
        return NOTHING

    def close(self) -> None:
        pass


NOTHING = Span()
OFF = Tracer()
_tracer = OFF


def start(service: str, is_wanted: bool) -> None:
    """Where spans go is said by the OTEL_… variables. Raises Fatal without the package."""
    global _tracer
    if not is_wanted:
        return
    try:
        from pool import spans
    except ModuleNotFoundError as error:
        raise Fatal(f"traces need the package {error.name}: install steplog[otel]") from error
    _tracer = spans.open_tracer(service)


def stop() -> None:
    """Sends what has ended, and records nothing more."""
    global _tracer
    _tracer.close()
    _tracer = OFF


def is_on() -> bool:
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
