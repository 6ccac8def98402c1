"""All engines: their health, and which one serves the next call.

A call goes to the engine that probably has the beginning of its prompt cached (`affinity`). If that
one runs many more of this process's calls than another, the next in the order of affinity gets it. A
call without affinity goes to the least loaded engine, and among equals to the one that was chosen
longest ago. An engine is usable while it is healthy, not stuck in a pause, and has weights that the
policy allows. Calls wait for a usable engine.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from gateway.engines.affinity import CacheAffinity
from gateway.engines.engine import ENGINE_ERRORS, Engine, EngineError
from gateway.engines.policy import Policy
from gateway.errors import Unavailable
from gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

POLL_EVERY_S = 2.0
CONNECT_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 4
"""vLLM closes idle connections after five seconds; a call must not use one that is closing."""
MAX_PAUSE_S = 60.0
"""A weight update takes a few seconds; an engine that stays paused longer was left by its trainer."""
AFFINITY_SLACK = 8
"""How many more calls than the least loaded engine one with the warm cache may have. A few more slow an
engine's other calls less than a long prompt that has to be computed again."""


class EngineRouter:
    """The engines that the gateway routes calls to. Opened by `open_engines`."""

    def __init__(self, session: aiohttp.ClientSession, policy: Policy, wait_s: float) -> None:
        self.session = session
        self.policy = policy
        self._wait_s = wait_s
        self._changed = asyncio.Event()
        self._poll_now = asyncio.Event()
        self.all: dict[str, Engine] = {}
        self._choices = itertools.count(1)
        policy.on_change = self._poll_now.set

    def set_urls(self, urls: Sequence[str]) -> None:
        """Replaces the list. Engines that stay keep their state; calls on removed ones run to their
        end."""
        urls = [url.rstrip("/") for url in urls]
        self.all = {url: self.all.get(url) or Engine(url, self.session) for url in urls}
        self._poll_now.set()

    def usable(self) -> list[Engine]:
        now = asyncio.get_running_loop().time()
        return [
            engine
            for engine in self.all.values()
            if engine.healthy
            and (engine.paused_since is None or now - engine.paused_since < MAX_PAUSE_S)
            and self.policy.allows(engine.version)
        ]

    def models(self) -> list[str]:
        """Names of the models that usable engines serve."""
        return list(dict.fromkeys(name for engine in self.usable() for name in engine.models))

    async def acquire(self, affinity: CacheAffinity, failed_urls: set[str]) -> Engine:
        """The engine for a call; waits for a usable one, up to the configured time. `failed_urls` have
        already failed this call."""
        return self._choose(affinity, failed_urls) or await self._wait_for_one(
            affinity, failed_urls
        )

    async def _wait_for_one(self, affinity: CacheAffinity, failed_urls: set[str]) -> Engine:
        try:
            async with asyncio.timeout(self._wait_s):
                while (engine := self._choose(affinity, failed_urls)) is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable(
                f"No engine became usable within {self._wait_s:g} s. Retry the request; GET /ready "
                "says what the gateway is waiting for.",
                wait_s=POLL_EVERY_S,  # then it waits here again, and goes on as soon as one is usable
            ) from None
        return engine

    def _choose(self, affinity: CacheAffinity, failed_urls: set[str]) -> Engine | None:
        usable = self.usable()
        # An engine that failed this call before is better than none: it may have recovered.
        candidates = [engine for engine in usable if engine.url not in failed_urls] or usable
        if not candidates:
            return None
        idlest = min(candidates, key=lambda engine: (engine.running, engine.last_choice))
        most = idlest.running + AFFINITY_SLACK
        preferred = (engine for engine in affinity.order(candidates) if engine.running <= most)
        chosen = next(preferred, idlest)
        chosen.last_choice = next(self._choices)
        return chosen

    def report_failure(self, engine: Engine, error: Exception) -> None:
        """Records that a call failed. An engine that did not respond gets no calls until a poll
        finds it healthy; one that responded with an error may only reject this request."""
        reason = error.summary if isinstance(error, EngineError) else str(error)
        log.warning("Engine %s failed a call: %s", engine.name, reason or type(error).__name__)
        engine.healthy = engine.healthy and isinstance(error, EngineError)
        self._poll_now.set()

    async def poll_forever(self) -> None:
        """Polls every engine regularly, and at once after a failure or a new version."""
        while True:
            self._poll_now.clear()
            await asyncio.gather(*(self._poll(engine) for engine in self.all.values()))
            self._changed.set()
            try:
                async with asyncio.timeout(POLL_EVERY_S):
                    await self._poll_now.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(0.05)  # limits polling of an engine that fails every call

    async def _poll(self, engine: Engine) -> None:
        try:
            await engine.poll()
        except ENGINE_ERRORS as error:
            if engine.healthy:
                log.warning(
                    "Engine %s is unhealthy: %s", engine.name, error or type(error).__name__
                )
            engine.healthy = False
        else:
            if not engine.healthy:
                log.info("Engine %s is healthy, weights %s", engine.name, engine.version)
            engine.healthy = True


async def follow_file(engines: EngineRouter, file: Path) -> None:
    """Updates the list of engines from a file with one URL per line."""
    current: list[str] | None = None
    while True:
        try:
            lines = (await asyncio.to_thread(file.read_text)).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            log.warning(
                "Cannot read the engines file %s, keeping the current list: %s", file, error
            )
        else:
            urls = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if urls != current:
                engines.set_urls(urls)
                names = ", ".join(engine.name for engine in engines.all.values())
                log.info("Engines: %s", names or "none")
                current = urls
        await asyncio.sleep(POLL_EVERY_S)


@asynccontextmanager
async def open_engines(settings: GatewaySettings, policy: Policy) -> AsyncIterator[EngineRouter]:
    """The configured engines, polled until the end."""
    timeout = aiohttp.ClientTimeout(total=settings.engine_timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    # Engines set no cookies; a real jar would be searched for every call.
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, cookie_jar=jar
    ) as session:
        engines = EngineRouter(session, policy, settings.engine_wait_s)
        engines.set_urls(settings.engines)
        tasks = [asyncio.create_task(engines.poll_forever(), name="poll engines")]
        if settings.engines_file is not None:
            follow = follow_file(engines, settings.engines_file)
            tasks.append(asyncio.create_task(follow, name="follow engines"))
        try:
            yield engines
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
