"""`steplog monitor`: the lag of every group and the work of every run, for Prometheus.

/health says that the process lives and never asks Kafka, /ready that it saw the cluster a moment ago.
A broker that goes away is waited for; the values stay those of the last look, with its time.
"""

import asyncio
import logging
import time

import uvicorn
from fastapi import FastAPI

from console.metrics import LookCollector
from console.observer import open_observer
from console.settings import MonitorSettings
from servicekit.errors import BrokerUnavailable, OffsetLost, TopicMismatch
from servicekit.process import listen, start_logging
from servicekit.status import make_status_app, make_status_server

log = logging.getLogger(__name__)

LOOKS_MISSED = 3
"""After so many it is not ready."""
LEAST_PATIENCE = 30.0
"""Seconds: one look may take longer than it is until the next."""


def serve(settings: MonitorSettings) -> None:
    """Runs until SIGTERM or Ctrl-C; raises Fatal with one sentence when it cannot."""
    asyncio.run(_serve(settings))


async def _serve(settings: MonitorSettings) -> None:
    collector = LookCollector()
    patience = max(LEAST_PATIENCE, LOOKS_MISSED * settings.every_s)
    with listen(settings.host, settings.port) as listener:
        start_logging("monitor", settings)
        app = make_app(collector, patience)
        server = make_status_server(app)
        watching = asyncio.create_task(_watch(settings, collector, server), name="watch")
        log.info("listening on http://%s:%d", *listener.getsockname()[:2])
        try:
            await server.serve(sockets=[listener])
        finally:
            watching.cancel()
            ended = await asyncio.gather(watching, return_exceptions=True)
        if isinstance(ended[0], Exception):
            raise ended[0]


async def _watch(
    settings: MonitorSettings, collector: LookCollector, server: uvicorn.Server
) -> None:
    """Looks until cancelled; ends the server when it can look no more."""
    try:
        while True:
            try:
                await _look(settings, collector)
            # The topics may be made later, or anew under a monitor that has read them.
            except (BrokerUnavailable, OffsetLost, TopicMismatch) as error:
                collector.failures += 1
                log.warning("waiting: %s", error)
                await asyncio.sleep(settings.every_s)
    except Exception:
        server.should_exit = True
        raise


async def _look(settings: MonitorSettings, collector: LookCollector) -> None:
    async with open_observer(settings) as observer:
        while True:
            collector.look = await observer.look()
            collector.looked_at = time.time()
            await asyncio.sleep(settings.every_s)


def make_app(collector: LookCollector, patience: float) -> FastAPI:
    def unseen() -> str | None:
        if collector.look is None:
            return "the cluster was not seen yet"
        silent = time.time() - collector.looked_at
        return f"the cluster was not seen for {silent:.0f} s" if silent > patience else None

    return make_status_app("steplog monitor", unseen, collector.registry)
