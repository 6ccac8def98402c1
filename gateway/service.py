"""The gateway as a process: it answers /health at once, and everything else when its parts run."""

import asyncio
import logging
import socket
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import uvloop

from gateway.atropos.mount import Mounted
from gateway.atropos.service import BACKLOG, end_with_keeper
from gateway.atropos.supervisor import Life, keep
from gateway.calls.generation import Generator
from gateway.engines.fleet import open_engines
from gateway.engines.policy import Policy
from gateway.gateway import Gateway
from gateway.http.app import App, State, make_app
from gateway.http.keys import load_keys
from gateway.http.server import http_server, serve_beside
from gateway.settings import GatewaySettings
from gateway.state.admission import Admission
from gateway.state.log import open_log
from gateway.state.recovery import Recovery
from gateway.state.trajectories import Rules, Trajectories
from gateway.tokens.renderer import Renderer
from pool import topics
from pool.readers.follower import Follower
from pool.topics import LEDGER, POLICY, STEPS, TOPICS, TRAJECTORIES
from servicekit.errors import BrokerUnavailable
from servicekit.process import listen, start_logging, tune_garbage_collector
from servicekit.tokenizer import hide_torch

log = logging.getLogger(__name__)

RETRY_AFTER = 2.0


def serve(settings: GatewaySettings) -> int:
    """Runs until SIGTERM or Ctrl-C; raises Fatal with one sentence, or gives an exit code, when it
    cannot."""
    hide_torch()
    keys = load_keys(settings.keys, settings.keys_file, settings.signing_secret)
    with ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in _listen(settings)]
        start_logging("gateway", settings)
        for listener in listeners:
            log.info("listening on http://%s:%d", *listener.getsockname()[:2])
        state = State(settings, keys)
        app = make_app(state)
        if settings.atropos:
            return _serve_with_atropos(state, app, listeners)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            server = http_server(app, settings.drain_s)
            runner.run(serve_beside(server, listeners, _run_parts(state)))
        return 0


def _listen(settings: GatewaySettings) -> Iterator[socket.socket]:
    shared = settings.reuse_port
    yield listen(settings.host, settings.port, reuse_port=shared)
    for port in settings.also_ports:
        yield listen(settings.host, port, reuse_port=shared, option="--also-ports")


def _serve_with_atropos(state: State, gateway: App, listeners: Sequence[socket.socket]) -> int:
    mounted = Mounted(state.settings.atropos_settings(), state.keys)
    app = mounted.beside(gateway)
    for listener in listeners:
        listener.listen(BACKLOG)

    async def serve_life(life: Life) -> None:
        server = http_server(app, state.settings.drain_s, backlog=BACKLOG)
        end_with_keeper(server, life)
        await serve_beside(server, listeners, _run_parts(state), mounted.run(life))

    def serve_once(life: Life) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_life(life))

    return keep(serve_once)


async def _run_parts(state: State) -> None:
    """Keeps the parts running until cancelled; raises when they cannot go on."""
    while True:
        try:
            await _run_once(state.settings, state)
        except BrokerUnavailable as error:  # it went away while the parts were opened
            log.warning("waiting: %s", error)
            await asyncio.sleep(RETRY_AFTER)


async def _run_once(settings: GatewaySettings, state: State) -> None:
    try:
        async with _open_parts(settings, state) as (gateway, tasks):
            state.gateway = gateway
            tune_garbage_collector()
            log.info("ready for calls of run %s", settings.run)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        state.gateway = None


@asynccontextmanager
async def _open_parts(
    settings: GatewaySettings, state: State
) -> AsyncIterator[tuple[Gateway, list["asyncio.Task[None]"]]]:
    state.missing = "the tokenizer is being loaded"
    renderer = await asyncio.to_thread(Renderer.load, settings.tokenizer)
    state.missing = f"waiting for Kafka at {settings.bootstrap}"
    await _check_topics(settings)
    codec = settings.codec()
    for topic in (STEPS, TRAJECTORIES):
        written = TOPICS[topic].records
        await asyncio.to_thread(codec.prepare, settings.topic_name(topic), written)
    policy = Policy(settings.run)
    admission = Admission(
        settings.run, settings.max_groups, settings.group_size, settings.usable_share
    )
    rules = Rules(
        run=settings.run,
        gateway=uuid.uuid4().hex,
        group_size=settings.group_size,
        deadline_s=settings.deadline_s,
        max_open_trajectories=settings.max_open_trajectories,
    )
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        opened = await enter(open_log(settings, codec))
        recovery = Recovery(opened)
        trajectories = Trajectories(opened, recovery, admission, rules)
        state.missing = "the log is being read"
        followers = [await enter(Follower(settings, POLICY, codec, policy.apply))]
        trajectories.follower = await enter(
            Follower(settings, TRAJECTORIES, codec, trajectories.apply, rules.gateway.encode())
        )
        followers.append(trajectories.follower)
        if settings.max_groups is not None:
            followers.append(await enter(Follower(settings, LEDGER, codec, admission.apply)))
        engines = await enter(open_engines(settings, policy))
        generator = Generator(renderer, engines, settings.parse == "always")
        gateway = Gateway(settings, state.keys, opened, trajectories, generator, policy)
        tasks = [
            asyncio.create_task(work, name=name)
            for name, work in {
                "sample ends": opened.sample_for_ever(),
                "producer": opened.ended(),
                "recover": recovery.work(),
                "tidy": trajectories.tidy_for_ever(),
            }.items()
        ]
        tasks += [asyncio.create_task(follower.wait_for_failure()) for follower in followers]
        try:
            yield gateway, tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _check_topics(settings: GatewaySettings) -> None:
    """A broker may come up after us; one that does not fit is a reason to stop."""
    while True:
        try:
            await asyncio.to_thread(topics.check, settings)
            return
        except BrokerUnavailable as error:
            log.warning("waiting: %s", error)
            await asyncio.sleep(RETRY_AFTER)
