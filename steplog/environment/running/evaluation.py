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
from steplog.environment.rollouts.group import Group, reward_cut_off_rollouts
from steplog.environment.rollouts.rollout import Item
from steplog.environment.running import weight_versions
from steplog.environment.running.group_runner import GroupRunner
from steplog.environment.running.journal import Journal
from steplog.environment.running.scheduler import Scheduler

CHANNEL = "val"


class EvaluationResult(NamedTuple):
    metrics: Mapping[str, float]
    folder: Path
    versions: Mapping[str, int]
    """Calls by the version of the weights that answered them."""

    def tracker_row(self) -> dict[str, float]:
        row = {**weight_versions.metrics(self.versions), **self.metrics}
        return {f"eval/{name}": value for name, value in row.items()}


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
        self._backend = backend
        self._folder = folder
        self._items = items
        self._groups: dict[int, Group[Item]] = {}
        """The accepted groups, by the number of their item."""
        self._archive = RolloutArchive(folder, "samples", self.title, settings.keep, jsonl=True)
        self._on_progress: Callable[[], None] = lambda: None
        self._scheduler = self._schedule(range(len(items)))

    def snapshot(self) -> WorkSnapshot:
        return self._scheduler.snapshot()

    async def run(self, stop: asyncio.Event, on_progress: Callable[[], None]) -> EvaluationResult:
        """`on_progress` is called whenever an item is done."""
        self._on_progress, began = on_progress, time.monotonic()
        await self._scheduler.run(stop)
        if self._environment.settings.eval_one_version:
            await self._repeat_outdated(stop)
        if not self._groups:
            raise EnvironmentFailed("The evaluation was stopped before any item was done.")
        groups = [self._groups[number] for number in sorted(self._groups)]
        if self._environment.settings.eval_one_version:
            for group in groups:
                self._archive.add(group)
        self._archive.write_page()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        # A group may be a single rollout, so only all of them show whether the environment rewards.
        reward_cut_off_rollouts(rollouts, self._environment.settings.truncated_reward)
        usable = sum(rollout.is_usable for rollout in rollouts)
        metrics = {"usable_share": usable / len(rollouts)}
        with required_call("evaluate()"):
            metrics |= finite_numbers("evaluate()", await self._environment.evaluate(groups))
        result = EvaluationResult(metrics, self._folder, weight_versions.count_calls(groups))
        self._write_metrics(result, time.monotonic() - began)
        return result

    async def _repeat_outdated(self, stop: asyncio.Event) -> None:
        """Repeats the items that older weights answered, until one version has answered all."""
        for rounds_left in reversed(range(self._environment.settings.attempts)):
            groups = list(self._groups.values())
            if any(map(weight_versions.is_unknown, groups)):
                raise EnvironmentFailed(
                    "--eval-one-version needs answers that name the version of the weights: evaluate "
                    "through the gateway, and make all calls with rollout.client."
                )
            outdated = weight_versions.find_outdated(groups)
            if not outdated or stop.is_set():
                return
            if not rounds_left:
                versions = ", ".join(weight_versions.count_calls(groups))
                raise EnvironmentFailed(
                    f"The weights changed in every round of the evaluation; versions {versions} "
                    "answered. Evaluate fewer items (--eval-items), or after the training."
                )
            self._scheduler = self._schedule([group.number for group in outdated])
            await self._scheduler.run(stop)

    def _schedule(self, numbers: Sequence[int]) -> Scheduler[Item]:
        """The scheduler of a round, which tries the items with these numbers."""
        settings, journal = self._environment.settings, Journal(None)

        async def draw(at: int) -> Item | None:
            journal.record_draw(at, {})
            return self._items[numbers[at]] if at < len(numbers) else None

        def on_group_done(group: Group[Item]) -> None:
            group.number = numbers[group.number]
            self._groups[group.number] = group
            self.statistics.add(group)
            if not settings.eval_one_version:  # otherwise it may be repeated
                self._archive.add(group)
            self._on_progress()

        runner = GroupRunner(
            self._environment, self._backend, journal, CHANNEL, settings.eval_samples
        )
        return Scheduler(settings, journal, runner, draw, on_group_done, len(numbers))

    def _write_metrics(self, result: EvaluationResult, seconds: float) -> None:
        document = {
            "environment": self._environment.title(),
            "items": len(self._groups),
            "samples": self._environment.settings.eval_samples,
            "seconds": round(seconds, 3),
            "versions": result.versions,
            "metrics": result.metrics,
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
