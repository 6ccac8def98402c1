"""All engines: which are well, and which takes the next call.

A call goes to the engine that had the trajectory's last call, for its prefix cache, unless another
has clearly less to do; else to the one with the least to do. An engine takes calls while it is
healthy, not stuck in a pause, and has weights that the policy allows. Calls wait for one.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from gateway.engines.engine import TROUBLES, Engine, EngineTrouble
from gateway.engines.policy import Policy
from gateway.errors import Unavailable
from gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

LOOK_EVERY = 2.0
CONNECT_TIMEOUT = 5.0
KEEP_ALIVE = 4
"""Seconds. vLLM closes idle connections after five; a call must not meet one that is closing."""
PAUSED_TOO_LONG = 60.0
"""Seconds. A weight update takes a few; an engine that stays paused was left alone by its trainer."""
SLACK = 8
"""Calls that the engine with the warm cache may have more than the idlest one."""


class Engines:
    """Made by `open_engines`."""

    def __init__(self, session: aiohttp.ClientSession, policy: Policy, wait: float) -> None:
        self.session = session
        self._policy = policy
        self._wait = wait
        self._changed = asyncio.Event()
        self._look_now = asyncio.Event()
        self.all: dict[str, Engine] = {}
        policy.on_change = self._look_now.set

    def set_urls(self, urls: Sequence[str]) -> None:
        """Takes a new list; engines that stay keep their state, calls on others run to their end."""
        urls = [url.rstrip("/") for url in urls]
        self.all = {url: self.all.get(url) or Engine(url, self.session) for url in urls}
        self._look_now.set()

    def usable(self) -> list[Engine]:
        now = asyncio.get_running_loop().time()
        return [
            engine
            for engine in self.all.values()
            if engine.healthy
            and (engine.paused_since is None or now - engine.paused_since < PAUSED_TOO_LONG)
            and self._policy.allows(engine.version)
        ]

    def models(self) -> list[str]:
        return list(dict.fromkeys(name for engine in self.usable() for name in engine.models))

    async def acquire(self, favourite: str | None, avoid: set[str]) -> Engine:
        """The engine for a call; waits for one, but not for ever."""
        return self._choose(favourite, avoid) or await self._wait_for_one(favourite, avoid)

    async def _wait_for_one(self, favourite: str | None, avoid: set[str]) -> Engine:
        try:
            async with asyncio.timeout(self._wait):
                while (engine := self._choose(favourite, avoid)) is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable(
                f"no engine could take the call within {self._wait:g} s; try again"
            ) from None
        return engine

    def _choose(self, favourite: str | None, avoid: set[str]) -> Engine | None:
        usable = self.usable()
        # One that failed this call before is better than none: it may be well again.
        candidates = [engine for engine in usable if engine.url not in avoid] or usable
        if not candidates:
            return None
        idlest = min(candidates, key=lambda engine: engine.running)
        known = self.all.get(favourite or "")
        if known in candidates and known.running <= idlest.running + SLACK:
            return known
        return idlest

    def failed(self, engine: Engine, error: Exception) -> None:
        """A call failed on it. One that does not answer gets no more calls until it was looked at and
        found well; one that says so may merely dislike the request."""
        why = error.sentence if isinstance(error, EngineTrouble) else str(error)
        log.warning("engine %s failed a call: %s", engine.name, why or type(error).__name__)
        engine.healthy = engine.healthy and isinstance(error, EngineTrouble)
        self._look_now.set()

    async def watch(self) -> None:
        """Looks at every engine, again and again."""
        while True:
            self._look_now.clear()
            await asyncio.gather(*(self._look(engine) for engine in self.all.values()))
            self._changed.set()
            try:
                async with asyncio.timeout(LOOK_EVERY):
                    await self._look_now.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(0.05)  # an engine that fails every call is not asked without rest

    async def _look(self, engine: Engine) -> None:
        try:
            await engine.look()
        except TROUBLES as error:
            if engine.healthy:
                log.warning("engine %s is not well: %s", engine.name, error)
            engine.healthy = False
        else:
            if not engine.healthy:
                log.info("engine %s is well, weights %s", engine.name, engine.version)
            engine.healthy = True


async def follow_file(engines: Engines, file: Path) -> None:
    """Keeps the list as a file has it, one URL per line."""
    known: list[str] | None = None
    while True:
        try:
            lines = (await asyncio.to_thread(file.read_text)).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            log.warning("the list of engines stays as it is: %s: %s", file, error)
        else:
            urls = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if urls != known:
                engines.set_urls(urls)
                named = ", ".join(engine.name for engine in engines.all.values())
                log.info("engines: %s", named or "none")
                known = urls
        await asyncio.sleep(LOOK_EVERY)


@asynccontextmanager
async def open_engines(settings: GatewaySettings, policy: Policy) -> AsyncIterator[Engines]:
    limit = aiohttp.ClientTimeout(total=settings.engine_timeout_s, sock_connect=CONNECT_TIMEOUT)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
    # Engines set no cookies; a jar would be looked through for every call.
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(timeout=limit, connector=connector, cookie_jar=jar) as session:
        engines = Engines(session, policy, settings.engine_wait_s)
        engines.set_urls(settings.engines)
        tasks = [asyncio.create_task(engines.watch(), name="watch engines")]
        if settings.engines_file is not None:
            follow = follow_file(engines, settings.engines_file)
            tasks.append(asyncio.create_task(follow, name="follow engines"))
        try:
            yield engines
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
