"""The gateway process. It serves /health at once, and everything else once its parts run."""

import asyncio
import logging
import socket
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import uvloop

from gateway.app import GatewayApp, make_app
from gateway.atropos.mount import AtroposMount
from gateway.atropos.service import BACKLOG, exit_with_supervisor
from gateway.atropos.supervisor import Supervision, supervise
from gateway.calls.generation import Generator
from gateway.engines.policy import Policy
from gateway.engines.router import open_engines
from gateway.http.keys import load_keys
from gateway.http.server import http_server, serve_beside
from gateway.routes.parts import GatewayParts, GatewayState
from gateway.settings import GatewaySettings
from gateway.state.admission import Admission
from gateway.state.log import open_log
from gateway.state.recovery import Recovery
from gateway.state.registrar import TrajectoryRules
from gateway.state.trajectories import Trajectories
from gateway.tokens.renderer import Renderer
from pool import topics
from pool.readers.follower import Follower
from pool.topics import LEDGER, POLICY, STEPS, TOPICS, TRAJECTORIES
from schemas import Record
from servicekit.errors import BrokerUnavailable
from servicekit.process import listen, start_logging, tune_garbage_collector
from servicekit.tokenizer import hide_torch

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2.0


def serve(settings: GatewaySettings) -> int:
    """Runs until SIGTERM or Ctrl-C and returns the exit code; raises Fatal if it cannot run."""
    hide_torch()
    keys = load_keys(settings.keys, settings.keys_file, settings.signing_secret)
    with ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in _listen(settings)]
        start_logging("gateway", settings)
        for listener in listeners:
            log.info("Listening on http://%s:%d", *listener.getsockname()[:2])
        state = GatewayState(settings, keys)
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


def _serve_with_atropos(
    state: GatewayState, gateway: GatewayApp, listeners: Sequence[socket.socket]
) -> int:
    mount = AtroposMount(state.settings.atropos_settings(), state.keys)
    app = mount.wrap(gateway)
    for listener in listeners:
        listener.listen(BACKLOG)

    async def serve_until_exit(supervision: Supervision) -> None:
        server = http_server(app, state.settings.drain_s, backlog=BACKLOG)
        exit_with_supervisor(server, supervision)
        await serve_beside(server, listeners, _run_parts(state), mount.run(supervision))

    def serve_once(supervision: Supervision) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_until_exit(supervision))

    return supervise(serve_once)


async def _run_parts(state: GatewayState) -> None:
    """Keeps the parts running until cancelled; raises when one of them fails for good."""
    while True:
        try:
            await _run_once(state.settings, state)
        except BrokerUnavailable as error:  # while the parts were being opened
            log.warning("Kafka is unavailable, retrying in %g s: %s", RETRY_AFTER_S, error)
            await asyncio.sleep(RETRY_AFTER_S)


async def _run_once(settings: GatewaySettings, state: GatewayState) -> None:
    try:
        async with _open_parts(settings, state) as (parts, tasks):
            state.parts = parts
            tune_garbage_collector()
            log.info("Ready to serve calls of run %s", settings.run)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        state.parts = None


@asynccontextmanager
async def _open_parts(
    settings: GatewaySettings, state: GatewayState
) -> AsyncIterator[tuple[GatewayParts, list["asyncio.Task[None]"]]]:
    """Opens all parts, in the order in which they need each other, and starts their tasks."""
    state.starting_reason = "it is loading the tokenizer"
    renderer = await asyncio.to_thread(Renderer.load, settings.tokenizer)
    state.starting_reason = f"it is waiting for Kafka at {settings.bootstrap}"
    await _check_topics(settings)
    codec = settings.codec()
    for topic in (STEPS, TRAJECTORIES):
        await asyncio.to_thread(codec.prepare, settings.topic_name(topic), TOPICS[topic].records)
    policy = Policy(settings.run)
    admission = Admission(
        settings.run, settings.max_groups, settings.group_size, settings.usable_share
    )
    rules = TrajectoryRules(
        run=settings.run,
        gateway=uuid.uuid4().hex,
        group_size=settings.group_size,
        deadline_s=settings.deadline_s,
        max_open_trajectories=settings.max_open_trajectories,
    )
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        steps_log = await enter(open_log(settings, codec))
        recovery = Recovery(steps_log)
        trajectories = Trajectories(steps_log, recovery, admission, rules)
        state.starting_reason = "it is reading the log"

        def apply_policy(record: Record) -> None:
            policy.apply(record)
            admission.apply(record)

        followers = [await enter(Follower(settings, POLICY, codec, apply_policy))]
        trajectories.registrar.follower = await enter(
            Follower(settings, TRAJECTORIES, codec, trajectories.apply, rules.gateway.encode())
        )
        followers.append(trajectories.registrar.follower)
        followers.append(await enter(Follower(settings, LEDGER, codec, admission.apply)))
        engines = await enter(open_engines(settings, policy))
        generator = Generator(renderer, engines, settings.parse == "always")
        parts = GatewayParts(settings, state.keys, steps_log, trajectories, generator, policy)
        tasks = [
            asyncio.create_task(coroutine, name=name)
            for name, coroutine in {
                "sample end offsets": steps_log.sample_forever(),
                "watch producer": steps_log.wait_for_failure(),
                "recover trajectories": recovery.serve_requests(),
                "evict trajectories": trajectories.evict_forever(),
            }.items()
        ]
        tasks += [asyncio.create_task(follower.wait_for_failure()) for follower in followers]
        try:
            yield parts, tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _check_topics(settings: GatewaySettings) -> None:
    """Waits for the broker; raises if its topics are missing or do not fit."""
    while True:
        try:
            await asyncio.to_thread(topics.check, settings)
            return
        except BrokerUnavailable as error:
            log.warning("Kafka is unavailable, retrying in %g s: %s", RETRY_AFTER_S, error)
            await asyncio.sleep(RETRY_AFTER_S)
