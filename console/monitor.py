"""`steplog monitor`: lag of every consumer group and backlog of every run, as Prometheus metrics.

/health reports that the process is alive and does not depend on Kafka; /ready reports that the last
snapshot of the cluster is recent. While a broker is down, the metrics keep the values and the time
of the last snapshot.
"""

import asyncio
import logging
import time

import uvicorn
from fastapi import FastAPI

from console.metrics import SnapshotCollector
from console.observer import open_observer
from console.settings import MonitorSettings
from servicekit.errors import BrokerUnavailable, OffsetLost, TopicMismatch
from servicekit.process import listen, start_logging
from servicekit.status import make_status_app, make_status_server

log = logging.getLogger(__name__)

MISSED_SNAPSHOTS = 3
"""It is not ready after this many missed snapshots."""
MIN_PATIENCE_S = 30.0
"""A single snapshot may take longer than the interval between them."""


def serve(settings: MonitorSettings) -> None:
    """Runs until SIGTERM or Ctrl-C; raises Fatal with one sentence if it cannot."""
    asyncio.run(_serve(settings))


async def _serve(settings: MonitorSettings) -> None:
    collector = SnapshotCollector()
    patience = max(MIN_PATIENCE_S, MISSED_SNAPSHOTS * settings.every_s)
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
            (error,) = await asyncio.gather(watching, return_exceptions=True)
        if isinstance(error, Exception):
            raise error


async def _watch(
    settings: MonitorSettings, collector: SnapshotCollector, server: uvicorn.Server
) -> None:
    """Takes snapshots until it is cancelled; stops the server on an unexpected error."""
    try:
        while True:
            try:
                await _take_snapshots(settings, collector)
            # The topics may be created later, or deleted and created again.
            except (BrokerUnavailable, OffsetLost, TopicMismatch) as error:
                collector.failures += 1
                log.warning("Cannot observe the cluster, retrying: %s", error)
                await asyncio.sleep(settings.every_s)
    except Exception:
        server.should_exit = True
        raise


async def _take_snapshots(settings: MonitorSettings, collector: SnapshotCollector) -> None:
    async with open_observer(settings) as observer:
        while True:
            collector.snapshot = await observer.observe()
            collector.taken_at = time.time()
            await asyncio.sleep(settings.every_s)


def make_app(collector: SnapshotCollector, patience: float) -> FastAPI:
    def reason_not_ready() -> str | None:
        if collector.snapshot is None:
            return "no snapshot of the cluster was taken yet"
        age = time.time() - collector.taken_at
        return f"the last snapshot of the cluster is {age:.0f} s old" if age > patience else None

    return make_status_app("steplog monitor", reason_not_ready, collector.registry)
