"""What was begun in one order is finished in it, however long each part takes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Turns:
    """Numbers, and for each of them a turn that comes after those of all lower ones."""

    def __init__(self, last: int) -> None:
        self.last = last
        """The highest number that was given out."""
        self._loop = asyncio.get_running_loop()
        self._newest: asyncio.Future[None] | None = None

    async def take(self, prepare: Callable[[int], Awaitable[T]], finish: Callable[[T], R]) -> R:
        """Prepares at once, under the next number; finishes when all before it are through."""
        self.last += 1
        before, done = self._newest, self._loop.create_future()
        self._newest = done
        try:
            try:
                prepared = await prepare(self.last)
            finally:
                if before is not None and not before.done():
                    await asyncio.shield(before)
            return finish(prepared)
        finally:
            done.set_result(None)
