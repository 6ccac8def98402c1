"""The main loop: draws items while there is room, runs their groups and passes on finished ones.

A running group is never stopped to make room. When asked to stop, the loop draws no more items and
gives running groups some time. What is not done by then is cancelled, and the next process draws
its items again.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any, Generic

from steplog.environment.errors import EnvironmentFailed
from steplog.environment.records.progress import WorkSnapshot
from steplog.environment.rollouts.group import Group
from steplog.environment.rollouts.rollout import Item
from steplog.environment.running.concurrency import Concurrency
from steplog.environment.running.group_runner import GroupRunner
from steplog.environment.running.journal import Journal
from steplog.environment.settings import EnvironmentSettings

DrawItem = Callable[[int], Coroutine[Any, Any, Item | None]]


class Scheduler(Generic[Item]):
    """Calls `on_group_done` with every finished group. `target` includes the groups of earlier
    processes. Items that rollouts put into the `backlog` are drawn even when the stream of items
    has ended."""

    def __init__(
        self,
        settings: EnvironmentSettings,
        journal: Journal,
        runner: GroupRunner[Item],
        draw: DrawItem[Item],
        on_group_done: Callable[[Group[Item]], None],
        target: int | None,
        backlog: Collection[Item] = (),
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._runner = runner
        self._draw = draw
        self._on_group_done = on_group_done
        self.target = target
        self._backlog = backlog
        self.concurrency = Concurrency(settings.workers)
        self._running: set[asyncio.Task[Group[Item]]] = set()
        self._drawing: asyncio.Task[Item | None] | None = None
        self._next = journal.first
        self._is_exhausted = False
        self._failures = 0
        self._is_stopping = False

    @property
    def running(self) -> int:
        return len(self._running)

    def snapshot(self) -> WorkSnapshot:
        return WorkSnapshot(
            done=self._journal.count,
            target=self.target,
            running=self.running,
            limit=self.concurrency.limit,
            wait_reason=self._wait_reason(),
        )

    def _wait_reason(self) -> str:
        if self._is_stopping and self.running:
            return (
                f"stopping; running groups have {self._settings.drain_s:g} s to finish, "
                "press Ctrl-C again to cancel them"
            )
        return self._runner.backend.wait_reason

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until the target is reached, the items run out, or `stop` is set."""
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set() and (self._may_draw() or self._running):
                if self._drawing is None and self._has_room():
                    self._drawing = asyncio.create_task(self._draw(self._next))
                await asyncio.wait([stopping, *self._tasks()], return_when=asyncio.FIRST_COMPLETED)
                self._start_drawn_item()
                self._collect_done()
            self._is_stopping = stop.is_set()
            await self._drain()
        finally:
            await cancel_tasks([stopping, *self._tasks()])

    def _tasks(self) -> list[asyncio.Task[Any]]:
        return [*self._running, *([self._drawing] if self._drawing else [])]

    def _may_draw(self) -> bool:
        is_wanted = self.target is None or self._journal.count + self.running < self.target
        return is_wanted and (not self._is_exhausted or bool(self._backlog))

    def _has_room(self) -> bool:
        return self._may_draw() and self.running < self.concurrency.limit

    def _start_drawn_item(self) -> None:
        if self._drawing is None or not self._drawing.done():
            return
        item, number = self._drawing.result(), self._next
        self._drawing = None
        if item is None:
            self._is_exhausted = True
            return
        self._next += 1
        if not self._journal.is_done(number):
            self._running.add(asyncio.create_task(self._runner.run(number, item)))

    def _collect_done(self) -> None:
        for task in [task for task in self._running if task.done()]:
            self._running.remove(task)
            group = task.result()
            self.concurrency.record_group(group.seconds_per_token, group.waited_s > 0)
            self._on_group_done(group)
            self._check_failures(group)

    def _check_failures(self, group: Group[Item]) -> None:
        self._failures = self._failures + 1 if group.failure else 0
        if self._failures >= self._settings.max_failures:
            raise EnvironmentFailed(
                f"{self._failures} groups in a row had no usable rollout. The last one failed "
                f"because: {group.failure}"
            )

    async def _drain(self) -> None:
        if self._running and self._settings.drain_s:
            await asyncio.wait(self._running, timeout=self._settings.drain_s)
        self._collect_done()


async def cancel_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
