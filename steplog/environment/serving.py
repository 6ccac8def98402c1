"""The three ways to run an environment.

serve       groups go through the gateway into the channel `train`, continuing where it stopped
process     groups are made with any OpenAI-style URL and go to files
evaluate    held-out items, through the gateway into the channel `val`, or with any such URL
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from servicekit.masking import mask_settings
from steplog.environment.author_code import describe_error, required_call
from steplog.environment.backends.backend import Backend, TrajectoryRegistration
from steplog.environment.backends.direct import Direct
from steplog.environment.backends.gateway import Client
from steplog.environment.base import BaseEnvironment, check
from steplog.environment.errors import EnvironmentFailed
from steplog.environment.records.archive import unused_folder
from steplog.environment.records.metrics_writer import MetricsWriter
from steplog.environment.records.progress import open_view
from steplog.environment.rollouts.rollout import Item
from steplog.environment.running.evaluation import EvaluationResult, prepare_evaluation
from steplog.environment.running.group_runner import TRAIN, close_unfinished
from steplog.environment.running.journal import Journal
from steplog.environment.running.scheduler import cancel_tasks
from steplog.environment.running.session import Session
from steplog.environment.settings import EnvironmentSettings

log = logging.getLogger(__name__)

DEFAULT_GROUPS = 8
"""Groups of `process`, unless a number is given."""
QUIET_S = 2.0
"""Waiting for the gateway is reported after this many seconds."""


async def serve(environment: BaseEnvironment[Item], stop: asyncio.Event | None = None) -> int:
    """Returns how many groups are done, including those of earlier processes."""
    check(environment)
    settings, folder = environment.settings, home(environment)
    journal, stop = Journal(folder / "journal.jsonl"), stop or asyncio.Event()
    if settings.groups is not None and journal.count >= settings.groups:
        log.warning(
            "%s already holds %d groups from an earlier run; raise --groups to make more, "
            "or choose another --dir.",
            folder,
            journal.count,
        )
    gateway = _gateway(settings)
    try:
        async with _running(environment, gateway, stop):
            await close_unfinished(gateway, journal, _registration(settings))
            if journal.first_state:
                environment.restore(journal.first_state)
            session = Session(
                environment,
                gateway,
                journal,
                folder,
                settings.groups,
                stop,
                settings.jsonl,
                gateway.version,
            )
            await session.run()
            return journal.count
    finally:
        journal.close()


async def process(environment: BaseEnvironment[Item], stop: asyncio.Event | None = None) -> Path:
    """Returns the folder with rollouts.jsonl and rollouts.html."""
    check(environment)
    settings = environment.settings
    if settings.url is None:
        raise EnvironmentFailed(
            "process needs --url, an OpenAI-style URL such as http://HOST:PORT/v1."
        )
    folder, stop = unused_folder(home(environment) / "process"), stop or asyncio.Event()
    async with _running(environment, _direct(settings), stop) as backend:
        target = settings.groups or DEFAULT_GROUPS
        session = Session(environment, backend, Journal(None), folder, target, stop, jsonl=True)
        await session.run()
    return folder


async def evaluate(
    environment: BaseEnvironment[Item], stop: asyncio.Event | None = None
) -> EvaluationResult:
    check(environment)
    settings = environment.settings
    backend = _direct(settings) if settings.url else _gateway(settings)
    stop = stop or asyncio.Event()
    async with _running(environment, backend, stop):
        folder = unused_folder(home(environment) / "evaluate")
        evaluation = await prepare_evaluation(environment, backend, folder)
        metrics = MetricsWriter(
            settings.trackers, environment.title(), folder, mask_settings(settings)
        )
        view = open_view(evaluation.title, evaluation.statistics, evaluation.snapshot)
        try:
            result = await evaluation.run(stop, view.refresh)
        finally:
            view.close()
        if not stop.is_set():
            metrics.write(0, result.tracker_row())
        await metrics.close()
        return result


@asynccontextmanager
async def _running(
    environment: BaseEnvironment[Item], backend: Backend, stop: asyncio.Event
) -> AsyncIterator[Backend]:
    """Waits for the backend and calls `setup()`; at the end calls `cleanup()`."""
    try:
        await _wait_for(backend, stop)
        with required_call("setup()"):
            await environment.setup()
        yield backend
    finally:
        await _clean_up(environment)
        await backend.close()


async def _wait_for(backend: Backend, stop: asyncio.Event) -> None:
    """Wait until the backend is ready, or raise when `stop` is set. Long waits are reported."""
    ready, stopping = asyncio.create_task(backend.ready()), asyncio.create_task(stop.wait())
    first = asyncio.FIRST_COMPLETED
    try:
        done, _ = await asyncio.wait({ready, stopping}, timeout=QUIET_S, return_when=first)
        if not done:
            sys.stderr.write(f"Waiting for {backend.description}: {backend.wait_reason}\n")
            await asyncio.wait({ready, stopping}, return_when=first)
        if not ready.done():
            raise EnvironmentFailed(f"Stopped while waiting for {backend.description}.")
        ready.result()
    finally:
        await cancel_tasks([ready, stopping])


async def _clean_up(environment: BaseEnvironment[Item]) -> None:
    try:
        await environment.cleanup()
    except Exception as error:  # the author's code; it must not hide why the run ended
        log.warning("cleanup() failed: %s", describe_error(error))
    if environment.settings.judge_url is not None:
        await environment.judge.close()


def home(environment: BaseEnvironment[Any]) -> Path:
    """The folder of the environment's journal and results."""
    return environment.settings.dir or Path(".steplog") / environment.title()


def _registration(settings: EnvironmentSettings) -> TrajectoryRegistration:
    return TrajectoryRegistration(TRAIN, settings.group_size, settings.deadline_s)


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
