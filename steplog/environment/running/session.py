"""One run of an environment: its groups, the evaluations in between, and all reports about them."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic

from servicekit.masking import mask_settings
from steplog.environment.author_code import describe_error, finite_numbers
from steplog.environment.backends.backend import Backend
from steplog.environment.base import BaseEnvironment
from steplog.environment.errors import EnvironmentFailed
from steplog.environment.records.archive import RolloutArchive, unused_folder
from steplog.environment.records.metrics_writer import MetricsWriter
from steplog.environment.records.progress import WorkSnapshot, open_view
from steplog.environment.records.statistics import Statistics
from steplog.environment.rollouts.group import Group
from steplog.environment.rollouts.rollout import Item
from steplog.environment.running.evaluation import Evaluation, prepare_evaluation
from steplog.environment.running.group_runner import GroupRunner
from steplog.environment.running.journal import Journal
from steplog.environment.running.scheduler import Scheduler, cancel_tasks

log = logging.getLogger(__name__)

CHANNEL = "train"


class Session(Generic[Item]):
    """`target` is a number of groups, including those of earlier processes."""

    def __init__(
        self,
        environment: BaseEnvironment[Item],
        backend: Backend,
        journal: Journal,
        folder: Path,
        target: int | None,
        stop: asyncio.Event,
        jsonl: bool,
    ) -> None:
        settings, title = environment.settings, f"steplog {environment.title()}"
        self._environment = environment
        self._backend = backend
        self._journal = journal
        self._archive = RolloutArchive(folder, "rollouts", title, settings.keep, jsonl)
        self._folder = folder
        self._stop = stop
        self._statistics = Statistics()
        runner = GroupRunner(environment, backend, journal, CHANNEL, settings.group_size)
        self._scheduler = Scheduler(
            settings, journal, runner, self._draw, self._on_group_done, target, environment.backlog
        )
        self._metrics = MetricsWriter(
            settings.trackers, environment.title(), folder, mask_settings(settings)
        )
        self._newest: Group[Item] | None = None
        self._evaluation: Evaluation[Item] | None = None
        self._evaluating: asyncio.Task[None] | None = None
        self._last_count = journal.count
        self._view = open_view(title, self._statistics, self._snapshot)

    async def run(self) -> None:
        reporting = asyncio.create_task(self._report_periodically())
        try:
            await self._scheduler.run(self._stop)
            self._check_items()
            if self._evaluating is not None:
                await self._evaluating
        finally:
            self._view.close()
            await cancel_tasks([reporting, *([self._evaluating] if self._evaluating else [])])
            await self._report()
            await self._metrics.close()

    def _check_items(self) -> None:
        if not self._journal.count and not self._stop.is_set():
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
        every, count = self._environment.settings.eval_every, self._journal.count
        if every and count // every > self._last_count // every:
            self._start_evaluation(count)
        self._last_count = count
        self._view.refresh()

    def _start_evaluation(self, after: int) -> None:
        """Training continues meanwhile. An evaluation that is still running is not disturbed."""
        if self._evaluating is not None and not self._evaluating.done():
            log.warning(
                "The evaluation after %d groups is skipped: the previous one is still running.",
                after,
            )
            return
        self._evaluating = asyncio.create_task(self._evaluate(after))

    async def _evaluate(self, after: int) -> None:
        folder = unused_folder(self._folder / f"evaluate-after-{after}")
        try:
            self._evaluation = await prepare_evaluation(self._environment, self._backend, folder)
            result = await self._evaluation.run(self._stop, self._view.refresh)
        except Exception as error:  # the author's code; training continues
            log.warning("The evaluation after %d groups failed: %s", after, describe_error(error))
            return
        finally:
            self._evaluation = None
        if not self._stop.is_set():  # otherwise it may cover only some of the items
            self._metrics.write(after, result.tracker_row())

    async def _report_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._environment.settings.report_every_s)
            await self._report()
            self._view.refresh()

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
        snapshot = self._scheduler.snapshot()
        if self._evaluation is None:
            return snapshot
        evaluation = self._evaluation.snapshot()
        note = f"evaluation: {evaluation.done:,} of {evaluation.target:,} items"
        return snapshot._replace(note=note)
