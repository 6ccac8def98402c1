"""A network that can be broken: a TCP proxy in a thread of the test.

delay       every byte takes so many seconds, in each direction
rate        bytes per second, on each connection and in each direction
hold(…)     bytes of one direction, or of both, stay where they are, and flow on afterwards
abandon()   the far end is gone and nobody tells: connections stay open and stay silent for ever
reset()     connections end with an RST
refuse      new connections end at once
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

HOST = "127.0.0.1"
BLOCK = 64 * 1024
HELD = 64
"""Blocks that are on their way in one direction; more stay with their sender."""
Direction = Literal["up", "down"]
Result = TypeVar("Result")


@dataclass(eq=False)
class _Connection:
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)

    def reset(self) -> None:
        for writer in (self.near, self.far):
            # Linger 0: the kernel throws away what is on its way and sends an RST.
            sock = writer.get_extra_info("socket")
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class Proxy:
    """Made by `running_proxy`."""

    def __init__(self, port: int, target: int) -> None:
        self.port = port
        self.target = target
        self.delay = 0.0
        self.rate: float | None = None
        self.refuse = False
        self._loop = asyncio.new_event_loop()
        self._open: dict[Direction, asyncio.Event] = {}
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._run(self._start)

    def stop(self) -> None:
        self._run(self._stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def hold(self, *directions: Direction) -> None:
        self._run(self._set, [self._open[name] for name in directions or ("up", "down")], False)

    def reset(self) -> None:
        self._run(self._reset)

    def abandon(self) -> None:
        self._run(self._abandon)

    def heal(self) -> None:
        """From now on bytes flow; abandoned connections stay silent."""
        self.delay, self.rate, self.refuse = 0.0, None, False
        self._run(self._set, list(self._open.values()), True)

    def _run(self, work: Callable[..., Awaitable[Result]], *args: Any) -> Result:
        async def run() -> Result:
            return await work(*args)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    async def _start(self) -> None:
        self._open = {"up": asyncio.Event(), "down": asyncio.Event()}
        for event in self._open.values():
            event.set()
        self._server = await asyncio.start_server(self._accept, HOST, self.port)

    async def _stop(self) -> None:
        self._server.close()
        await self._reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _set(self, events: list[asyncio.Event], flows: bool) -> None:
        for event in events:
            event.set() if flows else event.clear()

    async def _reset(self) -> None:
        for connection in list(self._connections):
            connection.reset()

    async def _abandon(self) -> None:
        for connection in self._connections:
            connection.abandoned.set()
            connection.far.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, near)
        except OSError:
            near.transport.abort()
        finally:
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        if self.refuse:
            near.transport.abort()
            return
        answers, far = await asyncio.open_connection(HOST, self.target)
        connection = _Connection(near, far)
        self._connections.add(connection)
        ways = [
            asyncio.create_task(self._pump("up", reader, far)),
            asyncio.create_task(self._pump("down", answers, near)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            await _cancel(ways)
            while connection.abandoned.is_set() and await reader.read(BLOCK):
                pass  # until the near end gives up; nobody answers
        finally:
            await _cancel(ways)
            self._connections.discard(connection)
            near.transport.abort()
            far.transport.abort()

    async def _pump(
        self,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Ends with the first end of the connection that closes."""
        blocks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(HELD)
        write = asyncio.create_task(self._write(direction, blocks, writer))
        try:
            while (block := await reader.read(BLOCK)) and not write.done():
                await blocks.put((self._loop.time(), block))
            await blocks.join()
        except OSError:
            return
        finally:
            await _cancel([write])

    async def _write(
        self,
        direction: Direction,
        blocks: "asyncio.Queue[tuple[float, bytes]]",
        writer: asyncio.StreamWriter,
    ) -> None:
        while True:
            came, block = await blocks.get()
            await asyncio.sleep(max(0.0, came + self.delay - self._loop.time()))
            while block:
                rate = self.rate
                part = block if rate is None else block[: max(1, int(rate / 4))]
                block = block[len(part) :]
                if rate is not None:
                    await asyncio.sleep(len(part) / rate)
                await self._open[direction].wait()
                writer.write(part)
                await writer.drain()
            blocks.task_done()


async def _cancel(tasks: list["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def running_proxy(port: int, target: int) -> Iterator[Proxy]:
    """Listens on `port`, and leads to `target`."""
    proxy = Proxy(port, target)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
