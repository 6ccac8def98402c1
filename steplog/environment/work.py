"""The loop: items are drawn while there is room, groups run, and what ends is passed on.

Nothing that runs is stopped to make room. Asked to stop, the loop draws no more and gives running
groups some time; what is not done by then is cancelled, and the next process draws its items again.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any, Generic

from steplog.environment.concurrency import Concurrency
from steplog.environment.errors import EnvironmentFailed
from steplog.environment.group import Group, Leader
from steplog.environment.journal import Journal
from steplog.environment.progress import Now
from steplog.environment.rollout import Item
from steplog.environment.settings import EnvironmentSettings

Draw = Callable[[int], Coroutine[Any, Any, Item | None]]


class Work(Generic[Item]):
    """`ended` is told of every group. `target` counts those of earlier lives too. What rollouts put
    into the `backlog` is drawn also when there are no more items."""

    def __init__(
        self,
        settings: EnvironmentSettings,
        journal: Journal,
        leader: Leader[Item],
        draw: Draw[Item],
        ended: Callable[[Group[Item]], None],
        target: int | None,
        backlog: Collection[Item] = (),
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._leader = leader
        self._draw = draw
        self._ended = ended
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

    def now(self) -> Now:
        return Now(
            done=self._journal.count,
            target=self.target,
            running=self.running,
            limit=self.concurrency.limit,
            waits_for=self._waits_for(),
        )

    def _waits_for(self) -> str:
        if self._is_stopping and self.running:
            drain_s = self._settings.drain_s
            return f"asked to stop, running groups get {drain_s:g} s; asked again it leaves them"
        return self._leader.backend.waits_for

    async def run(self, stop: asyncio.Event) -> None:
        """Until the target is reached, items run out, or `stop` is set."""
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set() and (self._may_draw() or self._running):
                if self._drawing is None and self._has_room():
                    self._drawing = asyncio.create_task(self._draw(self._next))
                await asyncio.wait([stopping, *self._tasks()], return_when=asyncio.FIRST_COMPLETED)
                self._begin_drawn()
                self._take_ended()
            self._is_stopping = stop.is_set()
            await self._drain()
        finally:
            await end([stopping, *self._tasks()])

    def _tasks(self) -> list[asyncio.Task[Any]]:
        return [*self._running, *([self._drawing] if self._drawing else [])]

    def _may_draw(self) -> bool:
        wanted = self.target is None or self._journal.count + self.running < self.target
        return wanted and (not self._is_exhausted or bool(self._backlog))

    def _has_room(self) -> bool:
        return self._may_draw() and self.running < self.concurrency.limit

    def _begin_drawn(self) -> None:
        if self._drawing is None or not self._drawing.done():
            return
        item, number = self._drawing.result(), self._next
        self._drawing = None
        if item is None:
            self._is_exhausted = True
            return
        self._next += 1
        if not self._journal.is_done(number):
            self._running.add(asyncio.create_task(self._leader.lead(number, item)))

    def _take_ended(self) -> None:
        for task in [task for task in self._running if task.done()]:
            self._running.remove(task)
            group = task.result()
            self.concurrency.ended(group.pace, group.waited_s > 0)
            self._ended(group)
            self._check(group)

    def _check(self, group: Group[Item]) -> None:
        self._failures = self._failures + 1 if group.failure else 0
        if self._failures >= self._settings.max_failures:
            raise EnvironmentFailed(
                f"{self._failures} groups in a row had no usable rollout; the last one: {group.failure}"
            )

    async def _drain(self) -> None:
        if self._running and self._settings.drain_s:
            await asyncio.wait(self._running, timeout=self._settings.drain_s)
        self._take_ended()


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    found = list(tasks)
    for task in found:
        task.cancel()
    await asyncio.gather(*found, return_exceptions=True)
