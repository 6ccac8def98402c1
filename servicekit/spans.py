"""The interface of spans and tracers, in a version that records nothing.

`servicekit.otel` has the version that exports to OpenTelemetry; `servicekit.tracing` chooses.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self

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

    def set_attributes(self, **attributes: Any) -> None:
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
        return NO_SPAN

    def current(self) -> Span:
        return NO_SPAN

    def close(self) -> None:
        pass


NO_SPAN = Span()
