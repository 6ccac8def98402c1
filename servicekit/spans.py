"""The interface of spans and tracers, in a version that records nothing.

`servicekit.otel` has the version that exports to OpenTelemetry; `servicekit.tracing` chooses.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self

TRACEPARENT = "traceparent"
Kind = Literal["internal", "server", "client", "producer", "consumer"]


class Span:
    """A timed piece of work. This class, for processes without traces, records nothing."""

    traceparent = ""
    """Identifies the span in other processes, in the format of W3C's header."""

    def __enter__(self) -> Self:
        """Makes it the parent of the spans that begin in the same task or thread."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def set_attributes(self, **attributes: Any) -> None:
        """Adds attributes. Never pass keys, or text of an agent or a model."""

    def event(self, name: str) -> None:
        pass

    def fail(self, kind: str) -> None:
        """Marks the span as failed. `kind` is the type of the error, not its message, which may quote
        an agent."""

    def end(self) -> None:
        """Ends a span that is not used in a `with` block, because its work ends elsewhere."""


class Tracer:
    def span(
        self,
        name: str,  # noqa: ARG002
        kind: Kind = "internal",  # noqa: ARG002
        parent: str | None = None,  # noqa: ARG002
        links: Sequence[str] = (),  # noqa: ARG002
        **attributes: Any,  # noqa: ARG002
    ) -> Span:
        return NO_SPAN

    def current(self) -> Span:
        return NO_SPAN

    def close(self) -> None:
        pass


NO_SPAN = Span()
