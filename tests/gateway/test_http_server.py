"""Bodies come whole, answers leave whole, however requests are cut and follow each other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.http.exchange import Exchange
from gateway.http_protocol import PIECE, HeaderList, Serve, Whole
from gateway.http_server import http_server
from servicekit.process import listen

LARGEST = 8 * PIECE
ASGI, DIRECT = b"asgi", b"direct"


class Echo:
    """Answers which way a request came, and its body."""

    max_body = LARGEST

    def __init__(self) -> None:
        self.held: asyncio.Future[Whole] = asyncio.get_running_loop().create_future()
        """A request that is not answered."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send, LARGEST)
        await exchange.deliver(200, await exchange.body(), [(b"way", ASGI)])

    def direct(self, _method: bytes, url: bytes, _headers: HeaderList) -> Serve | None:
        return {b"/direct": self._echo, b"/held": self._hold}.get(url)

    async def _echo(self, request: Whole) -> None:
        await request.deliver(200, await request.body(), [(b"way", DIRECT)])

    async def _hold(self, request: Whole) -> None:
        self.held.set_result(request)


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
async def served(echo: Echo) -> AsyncIterator[Client]:
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        server = http_server(echo, 1, direct=echo)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        try:
            yield Client(reader, writer)
        finally:
            writer.close()
            server.should_exit = True
            await serving


@pytest.mark.parametrize("path", ["/", "/direct"])
async def test_a_body_of_several_pieces_arrives_and_comes_back(path: str) -> None:
    body = bytes(range(256)) * (3 * PIECE // 256) + b"end"
    async with served(Echo()) as one:
        one.send(body, path=path)
        head, answered = await one.answer()
        assert answered == body
        assert "way: asgi" in head  # it is too long for the other one
        one.send(b"next", path=path)
        assert (await one.answer())[1] == b"next"


@pytest.mark.parametrize("paths", [["/"] * 5, ["/direct"] * 5, ["/direct", "/", "/direct"]])
async def test_requests_that_follow_each_other_at_once_are_answered_in_order(
    paths: list[str],
) -> None:
    bodies = [b"%d" % n * n for n in range(1, len(paths) + 1)]
    async with served(Echo()) as one:
        for body, path in zip(bodies, paths, strict=True):
            one.send(body, path=path)
        assert [(await one.answer())[1] for _ in bodies] == bodies


@pytest.mark.parametrize("path", ["/", "/direct"])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_connection_ends_after_the_answer_where_the_client_wants_it(
    path: str, version: str
) -> None:
    async with served(Echo()) as one:
        one.send(b"last", "connection: close", path=path, version=version)
        head, answered = await one.answer()
        assert "connection: close" in head
        assert answered == b"last"
        assert await one.is_hung_up()


async def test_what_an_app_wants_for_itself_does_not_pass_through_asgi() -> None:
    async with served(Echo()) as one:
        for body in (b"", b"one", b"x" * PIECE):
            one.send(body, path="/direct")
            head, answered = await one.answer()
            assert answered == body
            assert "way: direct" in head
        one.send(b"other", path="/other")
        assert "way: asgi" in (await one.answer())[0]


async def test_a_body_that_comes_in_chunks_is_whole() -> None:
    async with served(Echo()) as one:
        one.write(b"POST /direct HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for chunk in (b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n"):
            one.write(chunk)
        assert (await one.answer())[1] == b"onetwo"


async def test_a_client_that_asks_before_it_sends_its_body_is_told_to_go_on() -> None:
    async with served(Echo()) as one:
        one.write(
            b"POST /direct HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\nexpect: 100-continue\r\n\r\n"
        )
        assert "100 Continue" in await one.head()
        one.write(b"body")
        assert (await one.answer())[1] == b"body"


async def test_a_client_that_leaves_is_known_to_be_gone() -> None:
    echo = Echo()
    async with asyncio.timeout(30), served(echo) as one:
        one.send(b"", path="/held")
        request = await echo.held
        is_gone = request.is_gone()
        assert not is_gone()
        one.leave()
        while not is_gone():  # noqa: ASYNC110 - nobody is told, which is why it can be asked
            await asyncio.sleep(0.01)
        assert not await request.deliver(200, b"")
