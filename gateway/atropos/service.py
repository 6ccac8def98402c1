"""The Atropos server as a process: a keeper of the socket, and the server behind it."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import uvicorn
import uvloop

from gateway.atropos import metrics
from gateway.atropos.agents.assembly import Agents
from gateway.atropos.http.app import AtroposApp
from gateway.atropos.http.routes import Gate
from gateway.atropos.log.prompt_uids import Neighbours
from gateway.atropos.log.rebuild import Rebuild, Rebuilt
from gateway.atropos.log.retries import Retries
from gateway.atropos.log.writer import Log
from gateway.atropos.server import Server
from gateway.atropos.settings import AtroposSettings
from gateway.atropos.supervisor import Life, keep
from gateway.http.keys import load_keys
from gateway.http.server import http_server, serve_beside
from pool import topics
from pool.producers.producer import Producer
from pool.readers.reader import TopicReader, open_topic
from pool.topics import ATROPOS, REWARDED, TOPICS
from servicekit.errors import BrokerUnavailable, Fatal
from servicekit.process import listen, start_logging, tune_garbage_collector

log = logging.getLogger(__name__)

BACKLOG = 2048
"""Connections that wait while no server is there."""
RETRY_AFTER = 1.0
STALLED_AFTER = 3.0
"""Seconds that a record waits for its acknowledgement until we say that we are not ready."""


def serve(settings: AtroposSettings) -> int:
    """Runs until SIGTERM or Ctrl-C; gives an exit code when it cannot."""
    keys = load_keys(settings.keys, settings.keys_file, None)
    with listen(settings.host, settings.port) as listener:
        listener.listen(BACKLOG)
        start_logging("atropos", settings)
        log.info("listening on http://%s:%d", *listener.getsockname()[:2])
        # Made once, before any server is: it takes longer than all that a server does to begin.
        gate = Gate()
        app = AtroposApp(gate, settings.max_body_bytes, keys)
        tune_garbage_collector()

        def serve_once(life: Life) -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(settings, listener, gate, app, life))

        return keep(serve_once)


async def _serve(
    settings: AtroposSettings, listener: socket.socket, gate: Gate, app: AtroposApp, life: Life
) -> None:
    server = http_server(app, settings.drain_s, backlog=BACKLOG)
    end_with_keeper(server, life)
    await serve_beside(server, [listener], run_parts(settings, gate, life))


def end_with_keeper(server: uvicorn.Server, life: Life) -> None:
    def orphaned() -> None:
        asyncio.get_running_loop().remove_reader(life.keeper)
        server.should_exit = True

    asyncio.get_running_loop().add_reader(life.keeper, orphaned)


async def run_parts(settings: AtroposSettings, gate: Gate, life: Life) -> None:
    """Keeps the parts running until cancelled; raises when they cannot go on."""
    while True:
        try:
            async with _open_parts(settings, gate, life) as tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        except BrokerUnavailable as error:
            # Only before it is ready: later, records are sent again.
            log.warning("waiting: %s", error)
            await asyncio.sleep(RETRY_AFTER)


@asynccontextmanager
async def _open_parts(
    settings: AtroposSettings, gate: Gate, life: Life
) -> AsyncIterator[list["asyncio.Task[None]"]]:
    gate.problem = lambda: f"waiting for Kafka at {settings.bootstrap}"
    if life.is_first:
        await asyncio.to_thread(topics.check, settings, ATROPOS)
    codec = settings.codec()
    for topic in (REWARDED, ATROPOS):
        name = settings.topic_name(topic)
        await asyncio.to_thread(codec.prepare, name, TOPICS[topic].records)
    async with (
        Producer(settings, codec, compression_level=1) as producer,
        _open_topics(settings, ATROPOS, REWARDED) as (events, rewarded),
    ):
        rebuild = Rebuild(events, rewarded, producer, codec, settings.run)
        gate.problem = lambda: rebuild.progress
        rebuilt = await rebuild.run(life.owner)
        retries = Retries()
        neighbours = Neighbours(len(rewarded.partitions))
        written = Log(producer, settings.run, life.owner, rebuilt.state, retries, neighbours)
        # Before anything is written: every record says which answers were sent.
        retries.begin(rebuilt.unknown)
        await written.write_snapshot()
        server = Server(
            rebuilt.state, retries, written, settings.silent_after_s, settings.max_queue
        )
        _show(server)
        gate.open(server, lambda: _problem(written))
        log.info("ready for environments and trainers of run %s", settings.run)
        tasks = [
            asyncio.create_task(_watch(rebuild, rebuilt), name="watch for another server"),
            asyncio.create_task(server.tell_for_ever(), name="tell what was answered"),
            asyncio.create_task(written.ended(), name="producer"),
        ]
        if settings.serve_agents:
            agents = Agents(
                rewarded, codec, written, rebuilt.state, settings.run, settings.group_rules()
            )
            tasks.append(asyncio.create_task(agents.assemble_for_ever(), name="agents"))
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            if not any(isinstance(one, Fatal) for one in ended):
                await server.stop()


@asynccontextmanager
async def _open_topics(settings: AtroposSettings, *names: str) -> AsyncIterator[list[TopicReader]]:
    """All at the same time."""
    async with AsyncExitStack() as stack:
        opening = (stack.enter_async_context(open_topic(settings, name)) for name in names)
        yield await asyncio.gather(*opening)


async def _watch(rebuild: Rebuild, rebuilt: Rebuilt) -> None:
    while True:
        try:
            await rebuild.watch(rebuilt)
        except BrokerUnavailable as error:
            log.warning("watching is interrupted: %s", error)
            await asyncio.sleep(RETRY_AFTER)


def _problem(written: Log) -> str | None:
    if written.stalled_s > STALLED_AFTER:
        return f"Kafka has not acknowledged a record for {written.stalled_s:.0f} s"
    return None


def _show(server: Server) -> None:
    state = server.state
    metrics.queue_groups.set_function(lambda: len(state.queue))
    metrics.buffered_groups.set_function(
        lambda: sum(len(buffer.groups) for buffer in state.buffers.values())
    )
    metrics.environments.set_function(lambda: len(list(state.counted())))
    metrics.step.set_function(lambda: state.step)
