"""A run of items through an environment, and everything that is told of it."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic

from steplog.environment.authors import numbers, told
from steplog.environment.client import Backend
from steplog.environment.environment import Environment
from steplog.environment.errors import EnvironmentFailed
from steplog.environment.evaluation import Evaluation, begin
from steplog.environment.group import Group, Leader
from steplog.environment.journal import Journal
from steplog.environment.keeping import Rollouts, fresh
from steplog.environment.metrics_writer import MetricsWriter
from steplog.environment.progress import Now, open_view
from steplog.environment.rollout import Item
from steplog.environment.statistics import Statistics
from steplog.environment.work import Work, end

log = logging.getLogger(__name__)

CHANNEL = "train"


class Session(Generic[Item]):
    """`target` is a number of groups, those of earlier lives among them."""

    def __init__(
        self,
        environment: Environment[Item],
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
        self._rollouts = Rollouts(folder, "rollouts", title, settings.keep, jsonl)
        self._folder = folder
        self._stop = stop
        self._statistics = Statistics()
        leader = Leader(environment, backend, journal, CHANNEL, settings.group_size)
        self._work = Work(
            settings, journal, leader, self._draw, self._ended, target, environment.backlog
        )
        self._metrics = MetricsWriter(
            settings.trackers, environment.title(), folder, settings.shown()
        )
        self._newest: Group[Item] | None = None
        self._evaluation: Evaluation[Item] | None = None
        self._evaluating: asyncio.Task[None] | None = None
        self._counted = journal.count
        self._view = open_view(title, self._statistics, self._now)

    async def run(self) -> None:
        reporting = asyncio.create_task(self._report_for_ever())
        try:
            await self._work.run(self._stop)
            self._check_items()
            if self._evaluating is not None:
                await self._evaluating
        finally:
            self._view.close()
            await end([reporting, *([self._evaluating] if self._evaluating else [])])
            await self._report()
            await self._metrics.close()

    def _check_items(self) -> None:
        if not self._journal.count and not self._stop.is_set():
            raise EnvironmentFailed(
                f"{self._environment.title()} has no items: write get_next_item, "
                "or give it self.items in setup"
            )

    async def _draw(self, number: int) -> Item | None:
        if not self._journal.is_done(number):
            self._journal.drawn(number, self._environment.state())
        return await self._environment.draw()

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
        if self._evaluating is not None and not self._evaluating.done():
            log.warning("no evaluation after %d groups: the last one still runs", after)
            return
        self._evaluating = asyncio.create_task(self._evaluate(after))

    async def _evaluate(self, after: int) -> None:
        folder = fresh(self._folder / f"evaluate-after-{after}")
        try:
            self._evaluation = await begin(self._environment, self._backend, folder)
            evaluated = await self._evaluation.run(self._stop, self._view.tick)
        except Exception as error:  # it is the author's; training goes on
            log.warning("the evaluation after %d groups failed: %s", after, told(error))
            return
        finally:
            self._evaluation = None
        if not self._stop.is_set():  # else it may have only a part of the items
            self._metrics.write(after, evaluated.row())

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
            log.warning("metrics() or table_row() failed: %s", told(error))
        self._metrics.write(self._journal.count, values, table)

    def _table(self) -> list[Mapping[str, Any]]:
        """The newest group, at trackers."""
        if self._newest is None:
            return []
        item, rollouts = self._newest.item, self._newest.rollouts
        return [self._environment.table_row(item, rollout) for rollout in rollouts]

    def _now(self) -> Now:
        now = self._work.now()
        if self._evaluation is None:
            return now
        beside = self._evaluation.now()
        return now._replace(beside=f"evaluation {beside.done:,} of {beside.target:,} items")
