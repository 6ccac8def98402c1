"""The evaluations beside the groups of a run: when one is due, and its result.

They follow the number of groups, the versions of the weights, or both. Training continues meanwhile,
and only one evaluation runs at a time. One that is due by versions while another runs starts after it,
with the version of that moment; the journal remembers the last complete one, so that a process that
replaces a killed one neither repeats nor skips it.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic

from steplog.environment.author_code import describe_error
from steplog.environment.backends.backend import Backend
from steplog.environment.base import BaseEnvironment
from steplog.environment.records.archive import unused_folder
from steplog.environment.records.metrics_writer import MetricsWriter
from steplog.environment.rollouts.rollout import Item
from steplog.environment.running.evaluation import Evaluation, prepare_evaluation
from steplog.environment.running.journal import Journal
from steplog.environment.running.scheduler import cancel_tasks

log = logging.getLogger(__name__)


class Evaluations(Generic[Item]):
    """`on_progress` is called whenever an item is done."""

    def __init__(
        self,
        environment: BaseEnvironment[Item],
        backend: Backend,
        journal: Journal,
        folder: Path,
        metrics: MetricsWriter,
        stop: asyncio.Event,
        on_progress: Callable[[], None],
    ) -> None:
        self._environment = environment
        self._backend = backend
        self._journal = journal
        self._folder = folder
        self._metrics = metrics
        self._stop = stop
        self._on_progress = on_progress
        self._last_count = journal.count
        self._running: Evaluation[Item] | None = None
        self._task: asyncio.Task[None] | None = None

    def on_group_done(self) -> None:
        every, count = self._environment.settings.eval_every, self._journal.count
        is_due = every > 0 and count // every > self._last_count // every
        self._last_count = count
        if is_due and self._is_busy:
            log.warning(
                "The evaluation after %d groups is skipped: the previous one is still running.",
                count,
            )
        elif is_due:
            folder = self._folder / f"evaluate-after-{count}"
            self._task = asyncio.create_task(self._evaluate(f"after {count} groups", folder))

    def on_version(self, version: int) -> None:
        every, last = self._environment.settings.eval_every_versions, self._journal.evaluated
        is_due = every > 0 and (last is None or version // every > last // every)
        if is_due and not self._is_busy and not self._stop.is_set():
            self._task = asyncio.create_task(self._evaluate_version(version))

    @property
    def _is_busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def note(self) -> str:
        """How far the running evaluation is; empty if none is running."""
        if self._running is None:
            return ""
        snapshot = self._running.snapshot()
        return f"evaluation: {snapshot.done:,} of {snapshot.target:,} items"

    async def finish(self) -> None:
        """Waits for the evaluation that is running."""
        if self._task is not None:
            await self._task

    async def cancel(self) -> None:
        if self._task is not None:
            await cancel_tasks([self._task])

    async def _evaluate_version(self, version: int) -> None:
        folder = self._folder / f"evaluate-version-{version}"
        await self._evaluate(f"at version {version}", folder, version)
        if not self._stop.is_set():
            self._journal.record_evaluation(version)

    async def _evaluate(self, moment: str, folder: Path, version: int | None = None) -> None:
        count = self._journal.count
        try:
            evaluation = await prepare_evaluation(
                self._environment, self._backend, unused_folder(folder)
            )
            self._running = evaluation
            result = await evaluation.run(self._stop, self._on_progress)
        except Exception as error:  # the author's code; training continues
            log.warning("The evaluation %s failed: %s", moment, describe_error(error))
            return
        finally:
            self._running = None
        if not self._stop.is_set():  # otherwise it may cover only some of the items
            version_row = {} if version is None else {"eval/version": float(version)}
            self._metrics.write(count, result.tracker_row() | version_row)
