"""A producer for many writers at once, each of whom waits for its own record.

Records that come while others are under way wait until these have arrived, and then leave together.
That saves requests, and more: librdkafka has five requests under way at most, and while records wait
for one of these to return, its thread runs in circles.

Acknowledgements are waited for by a thread. They come for a whole convoy at once, so it takes the
interpreter from the event loop once, where looking for them every millisecond wakes it ten times.
"""

import asyncio
import threading
from collections import deque
from typing import Any

from confluent_kafka import KafkaError, Message

from pool.connection import Connection
from pool.errors import PoolError
from pool.producer import Output, Producer
from schemas import Codec, Position

LARGEST = 16
"""Records of a convoy. A request has a megabyte at most, and few records have a quarter of one."""
LISTEN_S = 0.2
"""Seconds after which the thread looks whether it is still needed."""

Acknowledged = asyncio.Future[Position]


class Convoys(Producer):
    """`linger_ms` is also how long a convoy that has left may still be joined."""

    def __init__(
        self, connection: Connection, codec: Codec, linger_ms: int, **options: Any
    ) -> None:
        super().__init__(connection, codec, linger_ms=linger_ms, **options)
        self._boarding_s = linger_ms / 1000
        self._left_at = 0.0
        self._held: deque[tuple[Output, Acknowledged]] = deque()
        self._arrived: deque[tuple[Acknowledged, KafkaError | None, Message]] = deque()
        self._ended = False
        self._thread = threading.Thread(target=self._listen, name="acknowledgements", daemon=True)
        self._thread.start()

    async def _hand_over(self, output: Output, acknowledged: Acknowledged) -> None:
        if not self._in_flight:
            self._left_at = self._loop.time()
            self._produce(output, acknowledged)
        elif self._may_be_joined():
            self._produce(output, acknowledged)
        else:
            self._held.append((output, acknowledged))

    def _may_be_joined(self) -> bool:
        """The convoy under way. Without one nothing is held, since nothing would end its waiting."""
        is_full = self._held or self._in_flight >= LARGEST
        return not is_full and self._loop.time() - self._left_at < self._boarding_s

    def _leave(self) -> None:
        """The client's queue has room: nothing else is in it."""
        self._left_at = self._loop.time()
        while self._held and self._in_flight < LARGEST:
            output, acknowledged = self._held.popleft()
            if acknowledged.done():
                continue  # the sender was cancelled
            try:
                self._produce(output, acknowledged)
            except PoolError as error:
                acknowledged.set_exception(error)

    def _listen(self) -> None:
        """In the thread."""
        while not self._ended:
            if self._client.poll(LISTEN_S):
                self._loop.call_soon_threadsafe(self._arrive)

    def _acknowledge(
        self, acknowledged: Acknowledged, error: KafkaError | None, message: Message
    ) -> None:
        """In the thread, too: futures belong to the loop."""
        self._arrived.append((acknowledged, error, message))

    def _arrive(self) -> None:
        while self._arrived:
            super()._acknowledge(*self._arrived.popleft())
        if not self._in_flight:
            self._leave()

    def _expect(self) -> None:
        """The thread does."""

    async def close(self) -> None:
        while self._held:
            self._room.clear()
            await self._room.wait()
        await super().close()
        self._ended = True
        await asyncio.to_thread(self._thread.join)  # it must not outlive the loop
        self._arrive()
