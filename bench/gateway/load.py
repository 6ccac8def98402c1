"""Calls at a chosen concurrency or rate, from a client that costs little itself."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit


class HttpRequest(NamedTuple):
    """One request, ready for the wire."""

    path: str
    body: bytes

    def encode(self) -> bytes:
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"content-length: {len(self.body)}\r\n\r\n"
        )
        return head.encode() + self.body


class HttpConnection:
    """A persistent HTTP/1.1 connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def call(self, request: HttpRequest) -> bytes:
        self._writer.write(request.encode())
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            status = head.splitlines()[0].decode()
            raise RuntimeError(f"{request.path}: {status}")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r")[0]
        if length:
            return await self._reader.readexactly(int(length))
        return await self._chunks()

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self._reader.readline(), 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()
        return body

    def close(self) -> None:
        self._writer.close()


async def connect(url: str) -> HttpConnection:
    address = urlsplit(url)
    return HttpConnection(*await asyncio.open_connection(address.hostname, address.port))


async def closed_loop(url: str, requests: list[HttpRequest], at_once: int) -> float:
    """Sends all requests, `at_once` of them concurrently; returns the seconds."""
    remaining = iter(requests)
    connections = [await connect(url) for _ in range(at_once)]

    async def agent(connection: HttpConnection) -> None:
        for request in remaining:
            await connection.call(request)

    began = time.perf_counter()
    await asyncio.gather(*(agent(connection) for connection in connections))
    seconds = time.perf_counter() - began
    for connection in connections:
        connection.close()
    return seconds


async def open_loop(
    url: str, request: Callable[[int], HttpRequest], rate: float, count: int
) -> list[float]:
    """Starts calls at a fixed rate, whether earlier ones are done or not; returns sorted latencies."""
    idle: list[HttpConnection] = []
    latencies = []

    async def call(at: int) -> None:
        began = time.perf_counter()
        # The one that was idle longest, because servers close idle connections.
        connection = idle.pop(0) if idle else await connect(url)
        await connection.call(request(at))
        idle.append(connection)
        latencies.append(time.perf_counter() - began)

    start = time.perf_counter()
    running = []
    for at in range(count):
        await asyncio.sleep(max(0.0, start + at / rate - time.perf_counter()))
        running.append(asyncio.create_task(call(at)))
    await asyncio.gather(*running)
    for connection in idle:
        connection.close()
    return sorted(latencies)
