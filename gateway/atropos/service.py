"""The Atropos server as a process: a supervisor that holds the socket, and the server behind it."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import uvicorn
import uvloop

from gateway.atropos import metrics
from gateway.atropos.agents.assembly import AgentGroups
from gateway.atropos.agents.scored_group import PULLED
from gateway.atropos.http.app import AtroposApp
from gateway.atropos.http.gate import Gate
from gateway.atropos.log.prompt_uids import PromptUids
from gateway.atropos.log.rebuild import RebuiltState, StateRebuild
from gateway.atropos.log.retries import RetryDetector
from gateway.atropos.log.writer import LogWriter
from gateway.atropos.own_trainer import CHANNEL, OwnTrainer, check_consumer
from gateway.atropos.server import AtroposServer
from gateway.atropos.settings import AtroposSettings
from gateway.atropos.supervisor import Supervision, supervise
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
"""Connections that wait in the socket while the server is restarted."""
RETRY_AFTER_S = 1.0
STALLED_AFTER_S = 3.0
"""Without an acknowledgement from Kafka for this long, /ready answers 503."""
LINGER_MS = 1
"""How long a group waits for others, so that posts that arrive together share a request to Kafka."""


def serve(settings: AtroposSettings) -> int:
    """Runs until SIGTERM or Ctrl-C; returns the exit code."""
    keys = load_keys(settings.keys, settings.keys_file, None)
    with listen(settings.host, settings.port) as listener:
        listener.listen(BACKLOG)
        start_logging("atropos", settings)
        log.info("listening on http://%s:%d", *listener.getsockname()[:2])
        # Built before the first fork: it takes longer than everything else a server does to start.
        gate = Gate()
        app = AtroposApp(gate, settings.max_body_bytes, keys)
        tune_garbage_collector()

        def serve_once(supervision: Supervision) -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(settings, listener, gate, app, supervision))

        return supervise(serve_once)


async def _serve(
    settings: AtroposSettings,
    listener: socket.socket,
    gate: Gate,
    app: AtroposApp,
    supervision: Supervision,
) -> None:
    server = http_server(app, settings.drain_s, backlog=BACKLOG)
    exit_with_supervisor(server, supervision)
    await serve_beside(server, [listener], run_parts(settings, gate, supervision))


def exit_with_supervisor(server: uvicorn.Server, supervision: Supervision) -> None:
    """Shuts the server down when its supervisor exits."""

    def shut_down() -> None:
        asyncio.get_running_loop().remove_reader(supervision.supervisor_fd)
        server.should_exit = True

    asyncio.get_running_loop().add_reader(supervision.supervisor_fd, shut_down)


async def run_parts(settings: AtroposSettings, gate: Gate, supervision: Supervision) -> None:
    """Rebuilds the state, opens the gate and runs the background tasks until cancelled; raises when
    they cannot continue."""
    while True:
        try:
            async with _open_parts(settings, gate, supervision) as tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        except BrokerUnavailable as error:
            # Happens only before the server is ready: later, records are sent again.
            log.warning("Waiting for Kafka: %s", error)
            await asyncio.sleep(RETRY_AFTER_S)


@asynccontextmanager
async def _open_parts(
    settings: AtroposSettings, gate: Gate, supervision: Supervision
) -> AsyncIterator[list["asyncio.Task[None]"]]:
    gate.find_problem = lambda: f"waiting for Kafka at {settings.bootstrap}"
    if supervision.is_first_start:
        await asyncio.to_thread(topics.check, settings, ATROPOS)
    codec = settings.codec()
    for topic in (REWARDED, ATROPOS):
        name = settings.topic_name(topic)
        await asyncio.to_thread(codec.prepare, name, TOPICS[topic].records)
    async with (
        Producer(settings, codec, linger_ms=LINGER_MS, compression_level=1) as producer,
        _open_topics(settings, ATROPOS, REWARDED) as (events, rewarded),
    ):
        rebuild = StateRebuild(events, rewarded, producer, codec, settings.run)
        gate.find_problem = lambda: rebuild.progress
        rebuilt = await rebuild.run(supervision.owner)
        check_consumer(rebuilt.state, settings.run, settings.train)
        retries = RetryDetector()
        prompt_uids = PromptUids(len(rewarded.partitions))
        channel = CHANNEL if settings.train else PULLED
        writer = LogWriter(
            producer, settings.run, supervision.owner, rebuilt.state, retries, prompt_uids, channel
        )
        # Before anything is written: every record says which answers were sent.
        retries.expect_retries_of(rebuilt.unsettled)
        await writer.write_snapshot()
        server = AtroposServer(
            rebuilt.state,
            retries,
            writer,
            settings.silent_after_s,
            settings.max_queue,
            settings.train,
        )
        _export_gauges(server)
        trainer = OwnTrainer(settings, codec, writer, rebuilt.state, settings.run)
        gate.open(server, lambda: _find_problem(writer) or trainer.problem)
        log.info("ready for environments and trainers of run %s", settings.run)
        tasks = [
            asyncio.create_task(_watch_for_takeover(rebuild, rebuilt), name="watch for takeover"),
            asyncio.create_task(server.record_sent_answers(), name="record sent answers"),
            asyncio.create_task(writer.wait_for_failure(), name="producer"),
        ]
        if settings.train:
            tasks.append(asyncio.create_task(trainer.follow(), name="trainer"))
        if settings.serve_agents:
            agents = AgentGroups(
                rewarded, codec, writer, rebuilt.state, settings.run, settings.group_rules()
            )
            tasks.append(asyncio.create_task(agents.run(), name="agents"))
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            if not any(isinstance(result, Fatal) for result in results):
                await server.stop()


@asynccontextmanager
async def _open_topics(settings: AtroposSettings, *names: str) -> AsyncIterator[list[TopicReader]]:
    """Opens all of them at the same time."""
    async with AsyncExitStack() as stack:
        readers = (stack.enter_async_context(open_topic(settings, name)) for name in names)
        yield await asyncio.gather(*readers)


async def _watch_for_takeover(rebuild: StateRebuild, rebuilt: RebuiltState) -> None:
    while True:
        try:
            await rebuild.watch_for_takeover(rebuilt)
        except BrokerUnavailable as error:
            log.warning("Cannot watch for another server of the run; trying again: %s", error)
            await asyncio.sleep(RETRY_AFTER_S)


def _find_problem(writer: LogWriter) -> str | None:
    if writer.stalled_s > STALLED_AFTER_S:
        return f"Kafka has not acknowledged a record for {writer.stalled_s:.0f} s"
    return None


def _export_gauges(server: AtroposServer) -> None:
    state = server.state
    metrics.queue_groups.set_function(lambda: len(state.queue))
    metrics.buffered_groups.set_function(
        lambda: sum(len(buffer.groups) for buffer in state.buffers.values())
    )
    metrics.environments.set_function(lambda: len(list(state.active_envs())))
    metrics.step.set_function(lambda: state.step)
