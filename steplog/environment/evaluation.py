"""Held-out items, tried and measured; nothing of it is trained on."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Generic, NamedTuple

from steplog.environment.authors import blamed, numbers
from steplog.environment.client import Backend
from steplog.environment.environment import Environment
from steplog.environment.errors import EnvironmentFailed
from steplog.environment.group import Group, Leader
from steplog.environment.journal import Journal
from steplog.environment.keeping import Rollouts
from steplog.environment.progress import Now
from steplog.environment.rollout import Item
from steplog.environment.statistics import Statistics
from steplog.environment.work import Work

CHANNEL = "val"


class Evaluated(NamedTuple):
    metrics: Mapping[str, float]
    folder: Path

    def row(self) -> dict[str, float]:
        """For trackers."""
        return {f"eval/{name}": value for name, value in self.metrics.items()}


class Evaluation(Generic[Item]):
    """Of the items that the environment has at this moment."""

    def __init__(
        self,
        environment: Environment[Item],
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
        self._rollouts = Rollouts(folder, "samples", self.title, settings.keep, jsonl=True)
        leader = Leader(environment, backend, self._journal, CHANNEL, settings.eval_samples)
        self._work = Work(settings, self._journal, leader, self._draw, self._ended, len(items))
        self._tick: Callable[[], None] = lambda: None

    def now(self) -> Now:
        return self._work.now()

    async def run(self, stop: asyncio.Event, tick: Callable[[], None]) -> Evaluated:
        """`tick` is told when an item is done."""
        self._tick, began = tick, time.monotonic()
        await self._work.run(stop)
        if not self._groups:
            raise EnvironmentFailed("the evaluation was stopped before any item was done")
        self._rollouts.write_page()
        metrics = {"usable_share": 1 - self.statistics.failed / self.statistics.rollouts}
        with blamed("evaluate()"):
            groups = sorted(self._groups, key=lambda group: group.number)
            metrics |= numbers("evaluate()", await self._environment.evaluate(groups))
        self._write_metrics(metrics, time.monotonic() - began)
        return Evaluated(metrics, self._folder)

    async def _draw(self, number: int) -> Item | None:
        self._journal.drawn(number, {})
        return self._items[number] if number < len(self._items) else None

    def _ended(self, group: Group[Item]) -> None:
        self._groups.append(group)
        self.statistics.add(group)
        self._rollouts.add(group)
        self._tick()

    def _write_metrics(self, metrics: Mapping[str, float], seconds: float) -> None:
        told = {
            "environment": self._environment.title(),
            "items": len(self._groups),
            "samples": self._environment.settings.eval_samples,
            "seconds": round(seconds, 3),
            "metrics": metrics,
            "settings": self._environment.settings.shown(),
        }
        (self._folder / "metrics.json").write_text(json.dumps(told, indent=2) + "\n")


async def begin(environment: Environment[Item], backend: Backend, folder: Path) -> Evaluation[Item]:
    with blamed("eval_items()"):
        items = list(islice(iter(await environment.eval_items()), environment.settings.eval_items))
    if not items:
        raise EnvironmentFailed(
            f"{environment.title()} has nothing to evaluate: give it eval_items"
        )
    return Evaluation(environment, backend, folder, items)
