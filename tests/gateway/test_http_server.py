"""Bodies come whole, answers leave whole, however requests are cut and follow each other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.exchange import Exchange
from gateway.http_server import PIECE, http_server
from pool.process import listen

LARGEST = 8 * PIECE


async def echo(scope: Any, receive: Any, send: Any) -> None:
    exchange = Exchange(scope, receive, send, LARGEST)
    await exchange.deliver(200, await exchange.body())


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, body: bytes, *headers: str) -> None:
        head = ["POST / HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers, "", ""]
        self._writer.write("\r\n".join(head).encode() + body)

    async def answer(self) -> tuple[str, bytes]:
        """Head and body."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        length = next(line for line in head.split("\r\n") if line.startswith("content-length"))
        return head, await self._reader.readexactly(int(length.split()[1]))

    async def is_hung_up(self) -> bool:
        return await self._reader.read() == b""


@asynccontextmanager
async def client() -> AsyncIterator[Client]:
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        server = http_server(echo, 1)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        try:
            yield Client(reader, writer)
        finally:
            writer.close()
            server.should_exit = True
            await serving


async def test_a_body_of_several_pieces_arrives_and_comes_back() -> None:
    body = bytes(range(256)) * (3 * PIECE // 256) + b"end"
    async with client() as one:
        one.send(body)
        _, answered = await one.answer()
        assert answered == body


async def test_requests_that_follow_each_other_at_once_are_answered_in_order() -> None:
    bodies = [b"%d" % n * n for n in range(1, 6)]
    async with client() as one:
        for body in bodies:
            one.send(body)
        assert [(await one.answer())[1] for _ in bodies] == bodies


async def test_a_connection_ends_after_the_answer_where_the_client_wants_it() -> None:
    async with client() as one:
        one.send(b"last", "connection: close")
        head, answered = await one.answer()
        assert "connection: close" in head
        assert answered == b"last"
        assert await one.is_hung_up()
