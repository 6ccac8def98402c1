"""The plan of a stack: its parts, in the order in which they are started."""

from collections.abc import Mapping
from typing import Literal

import msgspec

Kind = Literal["service", "once", "kafka"]


class StackPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    command: tuple[str, ...] = ()
    kind: Kind = "service"
    """A service is restarted when it fails. A part of kind `once` runs to its end. `kafka` is the local
    broker, which has its own process management."""
    ready: str | None = None
    """URL that answers 200 when the part is ready. Without one, it is ready as soon as it runs."""
    health: str | None = None
    """URL that answers with any status while the part works. Without one, a hang is not noticed."""
    needs: tuple[str, ...] = ()
    """Parts that must be ready, or have been ready, before this one is started."""
    variables: Mapping[str, str] = {}
    stop_s: float = 30.0
    """Seconds that it has to exit after SIGTERM."""
    url: str | None = None
    """Its address, for people."""


class BrokerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how the local broker runs."""

    dir: str
    port: int
    heap: str


class StackPlan(msgspec.Struct, frozen=True, kw_only=True):
    parts: tuple[StackPart, ...]
    """They are stopped in reverse order."""
    broker: BrokerPlan | None = None
    hang_s: float = 60.0
    """Seconds without an answer after which a running part is killed and restarted."""

    def part(self, name: str) -> StackPart | None:
        return next((part for part in self.parts if part.name == name), None)
