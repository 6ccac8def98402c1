"""One run of an environment: its groups, the evaluations in between, and all reports about them.

It ends when enough groups are done or the engines have the last version. Then no new group starts, but
a running evaluation is finished. When it is asked to stop, evaluations get as little time as groups.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Generic

from servicekit.masking import mask_settings
from steplog.environment.author_code import describe_error, finite_numbers
from steplog.environment.backends.backend import Backend
from steplog.environment.base import BaseEnvironment
from steplog.environment.errors import EnvironmentFailed
from steplog.environment.records.archive import RolloutArchive
from steplog.environment.records.metrics_writer import MetricsWriter
from steplog.environment.records.progress import WorkSnapshot, open_view
from steplog.environment.records.statistics import Statistics
from steplog.environment.rollouts.group import Group
from steplog.environment.rollouts.rollout import Item
from steplog.environment.running.evaluations import Evaluations
from steplog.environment.running.group_runner import TRAIN, GroupRunner
from steplog.environment.running.journal import Journal
from steplog.environment.running.scheduler import Scheduler, cancel_tasks

log = logging.getLogger(__name__)

VERSION_EVERY_S = 1.0
"""Seconds between two requests for the version of the weights."""
ReadVersion = Callable[[], Awaitable[int | None]]


class Session(Generic[Item]):
    """`target` is a number of groups, including those of earlier processes. `read_version` returns the
    version of the weights that all engines have, if there is one."""

    def __init__(
        self,
        environment: BaseEnvironment[Item],
        backend: Backend,
        journal: Journal,
        folder: Path,
        target: int | None,
        stop: asyncio.Event,
        jsonl: bool,
        read_version: ReadVersion | None = None,
    ) -> None:
        settings, title = environment.settings, f"steplog {environment.title()}"
        self._environment = environment
        self._journal = journal
        self._archive = RolloutArchive(folder, "rollouts", title, settings.keep, jsonl)
        self._stop = stop
        self._enough = asyncio.Event()
        """Set when no further group shall start."""
        self._read_version = read_version
        self._version: int | None = None
        self._statistics = Statistics()
        runner = GroupRunner(environment, backend, journal, TRAIN, settings.group_size)
        self._scheduler = Scheduler(
            settings, journal, runner, self._draw, self._on_group_done, target, environment.backlog
        )
        self._metrics = MetricsWriter(
            settings.trackers, environment.title(), folder, mask_settings(settings)
        )
        self._newest: Group[Item] | None = None
        self._evaluations = Evaluations(
            environment, backend, journal, folder, self._metrics, stop, self._refresh
        )
        self._view = open_view(title, self._statistics, self._snapshot)

    async def run(self) -> None:
        stopping = asyncio.create_task(self._stop.wait())
        watching = asyncio.create_task(self._watch_version())
        reporting = asyncio.create_task(self._report_periodically())
        for task in (stopping, watching):
            task.add_done_callback(lambda _: self._enough.set())
        try:
            await self._scheduler.run(self._enough)
            if watching.done():
                watching.result()
            self._check_items()
            await self._finish_evaluations()
        finally:
            self._view.close()
            await cancel_tasks([stopping, watching, reporting])
            await self._evaluations.cancel()
            await self._report()
            await self._metrics.close()

    async def _watch_version(self) -> None:
        """Returns when the engines have the version that ends the run. Raises if the gateway refuses to
        tell theirs."""
        settings = self._environment.settings
        last = settings.until_version
        is_needed = last is not None or settings.eval_every_versions
        while self._read_version is not None and is_needed:
            self._version = await self._read_version()
            if self._version is not None:
                self._evaluations.on_version(self._version)
                if last is not None and self._version >= last:
                    return
            await asyncio.sleep(VERSION_EVERY_S)
        await self._stop.wait()

    async def _finish_evaluations(self) -> None:
        """The last version is evaluated too, if an evaluation was running when it came."""
        await self._evaluations.finish()
        if self._version is not None:
            self._evaluations.on_version(self._version)
            await self._evaluations.finish()

    def _check_items(self) -> None:
        if not self._journal.count and not self._enough.is_set():
            raise EnvironmentFailed(
                f"{self._environment.title()} has no items. Write get_next_item(), "
                "or set self.items in setup()."
            )

    async def _draw(self, number: int) -> Item | None:
        if not self._journal.is_done(number):
            self._journal.record_draw(number, self._environment.state())
        return await self._environment.draw()

    def _on_group_done(self, group: Group[Item]) -> None:
        self._statistics.add(group)
        self._archive.add(group)
        self._newest = group
        self._evaluations.on_group_done()
        self._refresh()

    def _refresh(self) -> None:
        self._view.refresh()

    async def _report_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._environment.settings.report_every_s)
            await self._report()
            self._refresh()

    async def _report(self) -> None:
        self._archive.write_page()
        values = self._statistics.row()
        if not values:
            return
        values["perf/workers"] = self._scheduler.concurrency.limit
        table: list[Mapping[str, Any]] = []
        try:
            values |= finite_numbers("metrics()", await self._environment.metrics())
            table = self._table()
        except Exception as error:  # the author's code; rollouts continue
            log.warning("metrics() or table_row() failed: %s", describe_error(error))
        self._metrics.write(self._journal.count, values, table)

    def _table(self) -> list[Mapping[str, Any]]:
        """The newest group as a table for trackers."""
        if self._newest is None:
            return []
        item, rollouts = self._newest.item, self._newest.rollouts
        return [self._environment.table_row(item, rollout) for rollout in rollouts]

    def _snapshot(self) -> WorkSnapshot:
        return self._scheduler.snapshot()._replace(note=self._evaluations.note())
