"""Order of changes: they are applied in the order of their sequence numbers, however long each takes
to be written."""

import asyncio
import time


class SequenceOrder:
    """Assigns sequence numbers. A change that took some of them has its turn when all changes with
    lower numbers have ended."""

    def __init__(self, newest: int) -> None:
        self.newest = newest
        """The highest number that was assigned."""
        self._began: dict[int, float] = {}
        """When each pending change began, by its first number, the lowest first."""
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @property
    def oldest_s(self) -> float:
        """Seconds for which the oldest pending change has been under way."""
        oldest = next(iter(self._began.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    def begin(self, count: int = 1) -> int:
        """Assigns `count` numbers and returns the first, which identifies the change."""
        first = self.newest + 1
        self.newest += count
        self._began[first] = time.monotonic()
        return first

    async def wait_for_turn(self, first: int) -> None:
        if first == next(iter(self._began)):
            return
        turn = self._waiting[first] = asyncio.get_running_loop().create_future()
        try:
            await turn
        finally:
            del self._waiting[first]

    def end(self, first: int) -> None:
        """Ends a change, also one whose turn has not come."""
        del self._began[first]
        turn = self._waiting.get(next(iter(self._began), first))
        if turn is not None and not turn.done():
            turn.set_result(None)
