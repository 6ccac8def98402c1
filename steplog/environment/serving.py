"""What can be done with an environment: serve a trainer, process items on their own, or evaluate.

serve       groups go through the gateway into the channel `train`, from where it was left
process     any OpenAI-style URL; groups go to files
evaluate    held-out items, through the gateway into the channel `val`, or on any such URL
"""

import asyncio
import json
import logging
import re
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NamedTuple

from steplog.environment.authors import blamed, numbers
from steplog.environment.authors import told as told_error
from steplog.environment.client import About, Backend, Client, Direct
from steplog.environment.environment import Environment, check
from steplog.environment.errors import EnvironmentFailed
from steplog.environment.group import Group, Leader, settle
from steplog.environment.journal import Journal
from steplog.environment.keeping import Rollouts, fresh
from steplog.environment.progress import Now, open_view
from steplog.environment.rollout import Item
from steplog.environment.settings import EnvironmentSettings
from steplog.environment.statistics import Statistics
from steplog.environment.trackers import Run, Trackers
from steplog.environment.work import Work, end

log = logging.getLogger(__name__)

TRAIN, VAL = "train", "val"
GROUPS = 8
"""Of `process`, where no number is given."""
VERSION_EVERY_S = 1.0
"""Between two looks at the version, where one ends the run."""
SILENT_S = 2.0
"""A gateway that takes longer to answer is told of."""
FIRST = asyncio.FIRST_COMPLETED
LOGIN = re.compile(r"(?<=//)[^/@\s]+(?=@)")


class Evaluated(NamedTuple):
    metrics: Mapping[str, float]
    folder: Path


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
                with blamed("load_state_dict()"):
                    environment.load_state_dict(journal.first_state)
            rollouts = Rollouts(
                folder, "rollouts", _title(environment), settings.keep, settings.jsonl
            )
            session = Session(
                environment, backend, journal, rollouts, folder, settings.groups, stop
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
        rollouts = Rollouts(folder, "rollouts", _title(environment), settings.keep, jsonl=True)
        target = settings.groups or GROUPS
        session = Session(environment, backend, Journal(None), rollouts, folder, target, stop)
        await session.run()
    return folder


async def evaluate(environment: Environment[Item], stop: asyncio.Event | None = None) -> Evaluated:
    check(environment)
    settings = environment.settings
    backend = _direct(settings) if settings.url else _gateway(settings)
    stop = stop or asyncio.Event()
    async with _running(environment, backend, stop):
        folder = fresh(home(environment) / "evaluate")
        trackers = Trackers(settings.trackers, Run(environment.title(), folder, shown(settings)))
        found = await _evaluate(environment, backend, folder, stop, with_view=True)
        if not stop.is_set():
            trackers.write(0, _as_evaluation(found.metrics))
        await trackers.close()
        return found


class Session(Generic[Item]):
    """A run of items through an environment, and everything that is told of it."""

    def __init__(
        self,
        environment: Environment[Item],
        backend: Backend,
        journal: Journal,
        rollouts: Rollouts,
        folder: Path,
        target: int | None,
        stop: asyncio.Event,
    ) -> None:
        settings = environment.settings
        self._environment = environment
        self._backend = backend
        self._journal = journal
        self._rollouts = rollouts
        self._folder = folder
        self._stop = stop
        self._statistics = Statistics()
        leader = Leader(environment, backend, journal, TRAIN, settings.group_size)
        self._work = Work(
            settings, journal, leader, self._draw, self._ended, target, environment.backlog
        )
        self._trackers = Trackers(
            settings.trackers, Run(environment.title(), folder, shown(settings))
        )
        self._newest: Group[Item] | None = None
        self._evaluation: asyncio.Task[None] | None = None
        self._counted = journal.count
        self._view = open_view(_title(environment), self._statistics, self._now)

    async def run(self) -> None:
        reporting = asyncio.create_task(self._report_for_ever())
        try:
            await self._work.run(self._stop)
            self._check_items()
            if self._evaluation is not None:
                await self._evaluation
        finally:
            self._view.close()
            await end([reporting, *([self._evaluation] if self._evaluation else [])])
            await self._report()
            await self._trackers.close()

    def _check_items(self) -> None:
        if not self._journal.count and not self._stop.is_set():
            raise EnvironmentFailed(
                f"{self._environment.title()} has no items: write get_next_item, "
                "or give it self.items in setup"
            )

    async def _draw(self, number: int) -> Item | None:
        if not self._journal.is_done(number):
            self._journal.drawn(number, self._environment.state())
        return await self._environment.draw(number)

    def _ended(self, group: Group[Item]) -> None:
        self._statistics.add(group)
        self._rollouts.add(group)
        self._newest = group
        every, count = self._environment.settings.eval_every, self._journal.count
        if every and count // every > self._counted // every:
            self._begin_evaluation(count)
        self._counted = count
        self._view.tick()

    def _begin_evaluation(self, after: int) -> None:
        """Training goes on meanwhile. One that still runs is not disturbed by the next."""
        if self._evaluation is not None and not self._evaluation.done():
            log.warning("no evaluation after %d groups: the last one still runs", after)
            return
        self._evaluation = asyncio.create_task(self._evaluate(after))

    async def _evaluate(self, after: int) -> None:
        folder = fresh(self._folder / f"evaluate-after-{after}")
        try:
            told = await _evaluate(self._environment, self._backend, folder, self._stop)
        except Exception as error:  # it is the author's; training goes on
            log.warning("the evaluation after %d groups failed: %s", after, told_error(error))
            return
        if self._stop.is_set():  # then it may have only a part of the items
            return
        self._trackers.write(after, _as_evaluation(told.metrics))

    async def _report_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._environment.settings.report_every_s)
            await self._report()
            self._view.tick()

    async def _report(self) -> None:
        self._rollouts.write_page()
        values = self._statistics.row()
        if not values:
            return
        values["perf/workers"] = self._work.concurrency.limit
        table: list[Mapping[str, Any]] = []
        try:
            values |= numbers("metrics()", await self._environment.metrics())
            table = self._table()
        except Exception as error:  # the author's code; rollouts go on
            log.warning("metrics() or table_row() failed: %s", told_error(error))
        self._trackers.write(self._journal.count, values, table)

    def _table(self) -> list[Mapping[str, Any]]:
        """The newest group, at trackers."""
        if self._newest is None:
            return []
        item, rollouts = self._newest.item, self._newest.rollouts
        return [self._environment.table_row(item, rollout) for rollout in rollouts]

    def _now(self) -> Now:
        work = self._work
        return Now(
            done=self._journal.count,
            target=work.target,
            running=work.running,
            limit=work.concurrency.limit,
            waits_for=_waits_for(self._backend, self._stop, work),
        )


async def _evaluate(
    environment: Environment[Item],
    backend: Backend,
    folder: Path,
    stop: asyncio.Event,
    with_view: bool = False,
) -> Evaluated:
    settings, began = environment.settings, time.monotonic()
    with blamed("eval_items()"):
        items = list(islice(iter(await environment.eval_items()), settings.eval_items))
    if not items:
        raise EnvironmentFailed(
            f"{environment.title()} has nothing to evaluate: give it eval_items"
        )
    rollouts = Rollouts(
        folder, "samples", f"{_title(environment)}: evaluation", settings.keep, True
    )
    journal, statistics = Journal(None), Statistics()
    groups: list[Group[Item]] = []

    async def draw(number: int) -> Item | None:
        journal.drawn(number, {})
        return items[number] if number < len(items) else None

    def ended(group: Group[Item]) -> None:
        groups.append(group)
        statistics.add(group)
        rollouts.add(group)
        if view is not None:
            view.tick()

    leader = Leader(environment, backend, journal, VAL, settings.eval_samples)
    work = Work(settings, journal, leader, draw, ended, target=len(items))
    view = None
    if with_view:

        def now() -> Now:
            limit, why = work.concurrency.limit, _waits_for(backend, stop, work)
            return Now(len(groups), len(items), work.running, limit, why)

        view = open_view(f"{_title(environment)}: evaluation", statistics, now)
    try:
        await work.run(stop)
    finally:
        if view is not None:
            view.close()
    if not groups:
        raise EnvironmentFailed("the evaluation was stopped before any item was done")
    rollouts.write_page()
    metrics = {"usable_share": 1 - statistics.failed / statistics.rollouts}
    with blamed("evaluate()"):
        told = await environment.evaluate(sorted(groups, key=lambda group: group.number))
        metrics |= numbers("evaluate()", told)
    _write_metrics(folder, environment, metrics, len(groups), time.monotonic() - began)
    return Evaluated(metrics, folder)


def _as_evaluation(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"eval/{name}": value for name, value in metrics.items()}


def _write_metrics(
    folder: Path,
    environment: Environment[Any],
    metrics: Mapping[str, float],
    items: int,
    seconds: float,
) -> None:
    told = {
        "environment": environment.title(),
        "items": items,
        "samples": environment.settings.eval_samples,
        "seconds": round(seconds, 3),
        "metrics": metrics,
        "settings": shown(environment.settings),
    }
    (folder / "metrics.json").write_text(json.dumps(told, indent=2) + "\n")


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
        log.warning("cleanup() failed: %s", told_error(error))


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


def shown(settings: EnvironmentSettings) -> dict[str, Any]:
    """The settings for others to see: secrets are stars, and URLs have no login."""
    given = settings.model_dump(mode="json", exclude_none=True)
    return {
        name: LOGIN.sub("***", value) if isinstance(value, str) else value
        for name, value in given.items()
    }


def _about(environment: Environment[Any]) -> About:
    settings = environment.settings
    return About(TRAIN, settings.group_size, settings.deadline_s)


def _title(environment: Environment[Any]) -> str:
    return f"steplog {environment.title()}"


def _waits_for(backend: Backend, stop: asyncio.Event, work: Work[Any]) -> str:
    if stop.is_set() and work.running:
        return f"asked to stop, running groups get {work.drain_s:g} s; asked again it leaves them"
    return backend.waits_for


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
