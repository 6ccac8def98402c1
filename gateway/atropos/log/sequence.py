"""What was begun in one order is finished in it, however long each part takes."""

import asyncio
import time


class Turns:
    """Numbers, and for whoever takes some of them a turn: it comes when all lower ones have ended."""

    def __init__(self, last: int) -> None:
        self.last = last
        """The highest number that was given out."""
        self._began: dict[int, float] = {}
        """Turns under way by their first number, the lowest first."""
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @property
    def longest_s(self) -> float:
        """How long the oldest turn has been under way."""
        oldest = next(iter(self._began.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    def begin(self, count: int = 1) -> int:
        """Gives so many numbers out; the first of them names the turn."""
        first = self.last + 1
        self.last += count
        self._began[first] = time.monotonic()
        return first

    async def come(self, first: int) -> None:
        """Returns when the turn is there."""
        if first == next(iter(self._began)):
            return
        turn = self._waiting[first] = asyncio.get_running_loop().create_future()
        try:
            await turn
        finally:
            del self._waiting[first]

    def end(self, first: int) -> None:
        """Also of a turn that has not come."""
        del self._began[first]
        turn = self._waiting.get(next(iter(self._began), first))
        if turn is not None and not turn.done():
            turn.set_result(None)
