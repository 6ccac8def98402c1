"""Receipts: whether a client has read a response to its end.

That a response was written proves little, since the kernels of both sides buffer megabytes of it. But
TCP tells the rest. A client that closes a connection with unread data resets it; one that has read
everything closes it in order, or sends its next request. In either case its machine has acknowledged
every byte by then.
"""

import asyncio
import fcntl
import struct
import termios
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SCOPE_KEY = "steplog.connection"
"""Where requests find their connection in the ASGI scope."""


class ReceiptProtocol(HttpToolsProtocol):
    """A connection of uvicorn's whose responses may be followed by a receipt."""

    _receipt: "asyncio.Future[bool] | None" = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[SCOPE_KEY] = self

    def expect_receipt(self) -> "asyncio.Future[bool]":
        """Call this when all of a response is written, before it ends. The result is true when the
        client has read it, and false when the connection broke before that."""
        receipt: asyncio.Future[bool] = self.loop.create_future()
        if self.pipeline:  # its next request came before the response, and proves nothing
            receipt.set_result(not self.transport.is_closing())
            return receipt
        self._receipt = receipt
        if not self.cycle.keep_alive:
            # uvicorn would close the connection and never learn how the client took it.
            self.cycle.keep_alive = True
            self.loop.call_soon(self._end_writing)
        if self.transport.is_closing():
            self._settle(False)
        return receipt

    def _end_writing(self) -> None:
        if not self.transport.is_closing():
            self.transport.write_eof()

    def data_received(self, data: bytes) -> None:
        if self._receipt is not None:
            self._settle(True)
        super().data_received(data)

    def eof_received(self) -> None:
        self._settle(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle(exc is None)
        super().connection_lost(exc)

    def _settle(self, is_in_order: bool) -> None:
        if self._receipt is not None:
            self._receipt.set_result(is_in_order and not self._count_unacknowledged())
            self._receipt = None

    def _count_unacknowledged(self) -> int:
        """Bytes that the client's machine has not confirmed."""
        waiting = self.transport.get_write_buffer_size()
        sock = self.transport.get_extra_info("socket")
        try:
            packed = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4)
        except (OSError, ValueError):  # not every system tells it, and no closed socket
            return waiting
        return waiting + int(struct.unpack("i", packed)[0])
