"""What clients may rely on, however their requests arrive: long bodies, chunks, pipelining, Expect,
and that a client which leaves is noticed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.http.exchange import Exchange
from gateway.http.server import http_server
from servicekit.process import listen

MAX_BODY = 8 * 1024 * 1024


class Echo:
    """Answers with the body; a request for /held is not answered."""

    def __init__(self) -> None:
        self.held: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
        self.release = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send, MAX_BODY)
        body = await exchange.body()
        if scope["path"] == "/held":
            exchange.is_gone()
            self.held.set_result(exchange)
            await self.release.wait()
        else:
            await exchange.deliver(200, body)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, body: bytes, *headers: str, path: str = "/", version: str = "1.1") -> None:
        length = f"content-length: {len(body)}"
        head = [f"POST {path} HTTP/{version}", "host: x", length, *headers, "", ""]
        self.write("\r\n".join(head).encode() + body)

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def leave(self) -> None:
        self._writer.transport.abort()

    async def answer(self) -> tuple[str, bytes]:
        """Head and body."""
        head = await self.head()
        length = next(line for line in head.split("\r\n") if line.startswith("content-length"))
        return head, await self._reader.readexactly(int(length.split()[1]))

    async def head(self) -> str:
        return (await self._reader.readuntil(b"\r\n\r\n")).decode()

    async def is_hung_up(self) -> bool:
        return await self._reader.read() == b""


@asynccontextmanager
async def connected_client(echo: Echo) -> AsyncIterator[Client]:
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


async def test_a_long_body_arrives_and_comes_back() -> None:
    body = bytes(range(256)) * (3 * 1024 * 1024 // 256) + b"end"
    async with connected_client(Echo()) as client:
        client.send(body)
        assert (await client.answer())[1] == body
        client.send(b"next")
        assert (await client.answer())[1] == b"next"


async def test_pipelined_requests_are_answered_in_order() -> None:
    bodies = [b"%d" % n * n for n in range(1, 6)]
    async with connected_client(Echo()) as client:
        for body in bodies:
            client.send(body)
        assert [(await client.answer())[1] for _ in bodies] == bodies


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_connection_is_closed_after_the_answer_if_the_client_asks_for_it(
    version: str,
) -> None:
    async with connected_client(Echo()) as client:
        client.send(b"last", "connection: close", version=version)
        head, answered = await client.answer()
        assert "connection: close" in head
        assert answered == b"last"
        assert await client.is_hung_up()


async def test_a_chunked_body_arrives_complete() -> None:
    async with connected_client(Echo()) as client:
        client.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for chunk in (b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n"):
            client.write(chunk)
        assert (await client.answer())[1] == b"onetwo"


async def test_a_client_that_expects_100_continue_gets_it() -> None:
    async with connected_client(Echo()) as client:
        client.write(
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\nexpect: 100-continue\r\n\r\n"
        )
        assert "100 Continue" in await client.head()
        client.write(b"body")
        assert (await client.answer())[1] == b"body"


async def test_a_client_that_leaves_is_noticed() -> None:
    echo = Echo()
    async with asyncio.timeout(30), connected_client(echo) as client:
        client.send(b"", path="/held")
        exchange = await echo.held
        is_gone = exchange.is_gone()
        assert not is_gone()
        client.leave()
        while not is_gone():  # noqa: ASYNC110 - it is polled, as the server does
            await asyncio.sleep(0.01)
        assert not await exchange.deliver(200, b"")
        echo.release.set()
