"""Requests wait at the gate until the state is rebuilt from the log."""

import asyncio
from collections.abc import Callable

from gateway.atropos.server import AtroposServer
from gateway.errors import Unavailable


class Gate:
    """`server` is None until the state is rebuilt. `find_problem` returns why the server is not ready,
    or None if it is."""

    def __init__(self) -> None:
        self.server: AtroposServer | None = None
        self.find_problem: Callable[[], str | None] = lambda: "the server is starting"
        self._closing_reason = ""
        self._decided = asyncio.Event()

    def open(self, server: AtroposServer, find_problem: Callable[[], str | None]) -> None:
        self.server, self.find_problem = server, find_problem
        self._decided.set()

    def close(self, reason: str) -> None:
        """Permanently: waiting and later requests are refused with the reason."""
        self.server, self.find_problem, self._closing_reason = None, lambda: reason, reason
        self._decided.set()

    async def wait_until_open(self) -> AtroposServer:
        if self.server is None:
            await self._decided.wait()
        if self.server is None:
            raise Unavailable(self._closing_reason)
        return self.server
