"""Where the beginning of a call's prompt is probably cached: engines keep the keys and values of the
prompts that they have read.

A trajectory's calls extend each other, so the engine that served the last one is the best. The first
calls of a group share their prompt, so all of them prefer the same engine, by rendezvous hashing: every
gateway process prefers the same one without shared state, and when an engine comes or goes, only
groups that preferred it move.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gateway.engines.engine import Engine
from pool.core.versions import Version


class CacheAffinity(NamedTuple):
    prompt_uid: str | None = None
    last_engine: str | None = None
    """URL of the engine that served the trajectory's last call."""
    salt: Version | None = None
    """The salt of the trajectory's first call (`gateway.engines.kv_cache`)."""

    def order(self, engines: Sequence[Engine]) -> Iterator[Engine]:
        """The engines that may have the prompt cached, the likeliest first."""
        yield from (engine for engine in engines if engine.url == self.last_engine)
        if self.prompt_uid is not None:
            yield from sorted(engines, key=self._weight, reverse=True)

    def _weight(self, engine: Engine) -> bytes:
        return hashlib.blake2b(f"{self.prompt_uid} {engine.url}".encode(), digest_size=8).digest()


ANYWHERE = CacheAffinity()
"""The affinity of a call whose prompt no engine has."""
