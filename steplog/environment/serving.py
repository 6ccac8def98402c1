"""What can be done with an environment: serve a trainer, process items on their own, or evaluate.

serve       groups go through the gateway into the channel `train`, from where it was left
process     any OpenAI-style URL; groups go to files
evaluate    held-out items, through the gateway into the channel `val`, or on any such URL
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from steplog.environment.authors import blamed, told
from steplog.environment.client import About, Backend, Client, Direct
from steplog.environment.environment import Environment, check
from steplog.environment.errors import EnvironmentFailed
from steplog.environment.evaluation import Evaluated, begin
from steplog.environment.group import settle
from steplog.environment.journal import Journal
from steplog.environment.keeping import fresh
from steplog.environment.metrics_writer import MetricsWriter
from steplog.environment.progress import open_view
from steplog.environment.rollout import Item
from steplog.environment.session import CHANNEL, Session
from steplog.environment.settings import EnvironmentSettings
from steplog.environment.work import end

log = logging.getLogger(__name__)

GROUPS = 8
"""Of `process`, where no number is given."""
VERSION_EVERY_S = 1.0
"""Between two looks at the version, where one ends the run."""
SILENT_S = 2.0
"""A gateway that takes longer to answer is told of."""
FIRST = asyncio.FIRST_COMPLETED


async def serve(environment: Environment[Item], stop: asyncio.Event | None = None) -> int:
    """Returns how many groups are done, in all lives together."""
    check(environment)
    settings, folder = environment.settings, home(environment)
    journal, stop = Journal(folder / "journal.jsonl"), stop or asyncio.Event()
    if settings.groups is not None and journal.count >= settings.groups:
        log.warning(
            "%s has %d groups of earlier: give more, or another --dir", folder, journal.count
        )
    gateway = _gateway(settings)
    try:
        async with (
            _running(environment, gateway, stop) as backend,
            _stopping_at(settings.until_version, gateway, stop),
        ):
            await settle(backend, journal, _about(environment))
            if journal.first_state:
                environment.restore(journal.first_state)
            session = Session(
                environment, backend, journal, folder, settings.groups, stop, settings.jsonl
            )
            await session.run()
            return journal.count
    finally:
        journal.close()


async def process(environment: Environment[Item], stop: asyncio.Event | None = None) -> Path:
    """Returns the folder with rollouts.jsonl and rollouts.html."""
    check(environment)
    settings = environment.settings
    if settings.url is None:
        raise EnvironmentFailed(
            "process needs --url, an OpenAI-style URL such as http://HOST:PORT/v1"
        )
    folder, stop = fresh(home(environment) / "process"), stop or asyncio.Event()
    async with _running(environment, _direct(settings), stop) as backend:
        target = settings.groups or GROUPS
        session = Session(environment, backend, Journal(None), folder, target, stop, jsonl=True)
        await session.run()
    return folder


async def evaluate(environment: Environment[Item], stop: asyncio.Event | None = None) -> Evaluated:
    check(environment)
    settings = environment.settings
    backend = _direct(settings) if settings.url else _gateway(settings)
    stop = stop or asyncio.Event()
    async with _running(environment, backend, stop):
        folder = fresh(home(environment) / "evaluate")
        evaluation = await begin(environment, backend, folder)
        metrics = MetricsWriter(settings.trackers, environment.title(), folder, settings.shown())
        view = open_view(evaluation.title, evaluation.statistics, evaluation.now)
        try:
            found = await evaluation.run(stop, view.tick)
        finally:
            view.close()
        if not stop.is_set():
            metrics.write(0, found.row())
        await metrics.close()
        return found


@asynccontextmanager
async def _running(
    environment: Environment[Item], backend: Backend, stop: asyncio.Event
) -> AsyncIterator[Backend]:
    try:
        await _wait_for(backend, stop)
        with blamed("setup()"):
            await environment.setup()
        yield backend
    finally:
        await _clean_up(environment)
        await backend.close()


async def _wait_for(backend: Backend, stop: asyncio.Event) -> None:
    """Says so if it takes a while, and until when it may be asked to stop."""
    ready, stopping = asyncio.create_task(backend.ready()), asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait({ready, stopping}, timeout=SILENT_S, return_when=FIRST)
        if not done:
            sys.stderr.write(f"waits for {backend.where}: {backend.waits_for}\n")
            await asyncio.wait({ready, stopping}, return_when=FIRST)
        if not ready.done():
            raise EnvironmentFailed(f"stopped while it waited for {backend.where}")
        ready.result()
    finally:
        await end([ready, stopping])


async def _clean_up(environment: Environment[Item]) -> None:
    try:
        await environment.cleanup()
    except Exception as error:  # the author's; what was done stays, and why it ended is told
        log.warning("cleanup() failed: %s", told(error))


@asynccontextmanager
async def _stopping_at(
    version: int | None, gateway: Client, stop: asyncio.Event
) -> AsyncIterator[None]:
    """A gateway that does not tell the version ends it, too, with its words."""
    if version is None:
        yield
        return
    watching = asyncio.create_task(_reach(version, gateway))
    watching.add_done_callback(lambda _: stop.set())
    try:
        yield
        if watching.done():
            watching.result()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _reach(version: int, gateway: Client) -> None:
    while True:
        reached = await gateway.version()
        if reached is not None and reached >= version:
            return
        await asyncio.sleep(VERSION_EVERY_S)


def home(environment: Environment[Any]) -> Path:
    return environment.settings.dir or Path(".steplog") / environment.title()


def _about(environment: Environment[Any]) -> About:
    settings = environment.settings
    return About(CHANNEL, settings.group_size, settings.deadline_s)


def _key(settings: EnvironmentSettings) -> str | None:
    return settings.api_key.get_secret_value() if settings.api_key else None


def _gateway(settings: EnvironmentSettings) -> Client:
    return Client(
        settings.gateway,
        _key(settings),
        patience_s=settings.patience_s,
        timeout_s=settings.rollout_timeout_s,
    )


def _direct(settings: EnvironmentSettings) -> Direct:
    assert settings.url is not None
    return Direct(settings.url, _key(settings), settings.rollout_timeout_s, settings.patience_s)
