"""What a stack consists of: its parts, in the order in which they are started."""

from collections.abc import Mapping
from typing import Literal

import msgspec

Kind = Literal["service", "once", "kafka"]


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    command: tuple[str, ...] = ()
    kind: Kind = "service"
    """A service is restarted when it fails. `once` is ready when it has ended well. `kafka` is the
    local broker, which keeps its own files."""
    ready: str | None = None
    """URL that answers 200 when the part is ready; without one, it is when it runs."""
    health: str | None = None
    """URL that answers, with whatever, as long as the part lives; without one, nobody sees it hang."""
    needs: tuple[str, ...] = ()
    """Parts that must have been ready before this one is started."""
    variables: Mapping[str, str] = {}
    stop_s: float = 30.0
    """Seconds that it gets to end when asked."""
    url: str | None = None
    """Where people find it."""


class Broker(msgspec.Struct, frozen=True, kw_only=True):
    """Where the local broker lives."""

    dir: str
    port: int
    heap: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    parts: tuple[Part, ...]
    """They are ended in the opposite order."""
    broker: Broker | None = None
    hang_s: float = 60.0
    """Seconds of silence after which a part that runs is killed and started again."""

    def part(self, name: str) -> Part | None:
        return next((part for part in self.parts if part.name == name), None)
