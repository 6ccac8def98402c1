"""Evaluations: held-out items are tried and measured, and never trained on."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Generic, NamedTuple

from servicekit.masking import mask_settings
from steplog.environment.author_code import finite_numbers, required_call
from steplog.environment.backends.backend import Backend
from steplog.environment.base import BaseEnvironment
from steplog.environment.errors import EnvironmentFailed
from steplog.environment.records.archive import RolloutArchive
from steplog.environment.records.progress import WorkSnapshot
from steplog.environment.records.statistics import Statistics
from steplog.environment.rollouts.group import Group
from steplog.environment.rollouts.rollout import Item
from steplog.environment.running.group_runner import GroupRunner
from steplog.environment.running.journal import Journal
from steplog.environment.running.scheduler import Scheduler

CHANNEL = "val"


class EvaluationResult(NamedTuple):
    metrics: Mapping[str, float]
    folder: Path

    def tracker_row(self) -> dict[str, float]:
        return {f"eval/{name}": value for name, value in self.metrics.items()}


class Evaluation(Generic[Item]):
    """One evaluation on a fixed list of items."""

    def __init__(
        self,
        environment: BaseEnvironment[Item],
        backend: Backend,
        folder: Path,
        items: Sequence[Item],
    ) -> None:
        settings = environment.settings
        self.title = f"steplog {environment.title()}: evaluation"
        self.statistics = Statistics()
        self._environment = environment
        self._folder = folder
        self._items = items
        self._groups: list[Group[Item]] = []
        self._journal = Journal(None)
        self._archive = RolloutArchive(folder, "samples", self.title, settings.keep, jsonl=True)
        runner = GroupRunner(environment, backend, self._journal, CHANNEL, settings.eval_samples)
        self._scheduler = Scheduler(
            settings, self._journal, runner, self._draw, self._on_group_done, len(items)
        )
        self._on_progress: Callable[[], None] = lambda: None

    def snapshot(self) -> WorkSnapshot:
        return self._scheduler.snapshot()

    async def run(self, stop: asyncio.Event, on_progress: Callable[[], None]) -> EvaluationResult:
        """`on_progress` is called whenever an item is done."""
        self._on_progress, began = on_progress, time.monotonic()
        await self._scheduler.run(stop)
        if not self._groups:
            raise EnvironmentFailed("The evaluation was stopped before any item was done.")
        self._archive.write_page()
        unusable = self.statistics.failed + self.statistics.dropped
        metrics = {"usable_share": 1 - unusable / self.statistics.rollouts}
        with required_call("evaluate()"):
            groups = sorted(self._groups, key=lambda group: group.number)
            metrics |= finite_numbers("evaluate()", await self._environment.evaluate(groups))
        self._write_metrics(metrics, time.monotonic() - began)
        return EvaluationResult(metrics, self._folder)

    async def _draw(self, number: int) -> Item | None:
        self._journal.record_draw(number, {})
        return self._items[number] if number < len(self._items) else None

    def _on_group_done(self, group: Group[Item]) -> None:
        self._groups.append(group)
        self.statistics.add(group)
        self._archive.add(group)
        self._on_progress()

    def _write_metrics(self, metrics: Mapping[str, float], seconds: float) -> None:
        document = {
            "environment": self._environment.title(),
            "items": len(self._groups),
            "samples": self._environment.settings.eval_samples,
            "seconds": round(seconds, 3),
            "metrics": metrics,
            "settings": mask_settings(self._environment.settings),
        }
        (self._folder / "metrics.json").write_text(json.dumps(document, indent=2) + "\n")


async def prepare_evaluation(
    environment: BaseEnvironment[Item], backend: Backend, folder: Path
) -> Evaluation[Item]:
    """An evaluation of the items that the environment's `eval_items` returns now: of all of them,
    unless `--eval-items` says otherwise."""
    with required_call("eval_items()"):
        items = list(islice(iter(await environment.eval_items()), environment.settings.eval_items))
    if not items:
        raise EnvironmentFailed(
            f"{environment.title()} has nothing to evaluate: its eval_items() returns no items."
        )
    return Evaluation(environment, backend, folder, items)
