"""A producer for many writers at once, each of whom waits for its own record.

Records leave together, in convoys, and one convoy is under way at a time. The next one waits for as
many records as there were when the last one arrived, since those who sent them will soon send again,
but it does not wait long. So who is alone waits for nobody, and eight who send again and again take
one request for eight records. It saves more than requests: each of them wakes three threads, and
while records wait for one to return, librdkafka's thread runs in circles.

Acknowledgements are waited for by a thread. They come for a whole convoy at once, so it takes the
interpreter from the event loop once, where looking for them every millisecond wakes it ten times.
"""

import asyncio
import threading
from collections import deque
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message

from pool.connection import Connection
from pool.producers.sender import Acknowledged, BaseProducer, Output
from schemas import Codec, Position
from servicekit.errors import Fatal

LARGEST = 64
"""Records of a convoy."""
BOARDING_S = 0.005
"""Seconds that a convoy waits at most."""
LISTEN_S = 0.2
"""Seconds after which the thread looks whether it is still needed."""


class Convoys(BaseProducer):
    """Records have no headers: the client's batches know of none."""

    def __init__(
        self, connection: Connection, codec: Codec, timeout: float = 30.0, **options: Any
    ) -> None:
        super().__init__(connection, codec, timeout, linger_ms=0, **options)
        self._waiting_to_leave: deque[tuple[Output, Acknowledged]] = deque()
        self._size = 0
        """Of the convoy that left last."""
        self._expected = 1
        self._boarding: asyncio.TimerHandle | None = None
        """The end of the next one's waiting."""
        self._arrived: deque[tuple[Acknowledged, KafkaError | None, Message | None]] = deque()
        self._ended = False
        self._thread = threading.Thread(target=self._listen, name="acknowledgements", daemon=True)
        self._thread.start()

    def submit(self, output: Output) -> Acknowledged:
        """What `send` waits for, begun at once."""
        if self._closed:
            raise Fatal("the producer is closed")
        assert not output.headers
        acknowledged: Acknowledged = self._loop.create_future()
        self._waiting_to_leave.append((output, acknowledged))
        is_complete = len(self._waiting_to_leave) >= self._expected
        if not self._in_flight and (is_complete or self._boarding is None):
            self._leave()
        return acknowledged

    async def _deliver(self, output: Output) -> Position:
        return await self.submit(output)

    def _board(self) -> None:
        """The next convoy; all that left have arrived."""
        self._expected = min(self._size + len(self._waiting_to_leave), LARGEST)
        if len(self._waiting_to_leave) >= self._expected:
            self._leave()
        else:
            self._boarding = self._loop.call_later(BOARDING_S, self._leave)

    def _leave(self) -> None:
        if self._boarding is not None:
            self._boarding.cancel()
            self._boarding = None
        messages: dict[str, list[dict[str, Any]]] = {}
        while self._waiting_to_leave and self._in_flight < LARGEST:
            output, acknowledged = self._waiting_to_leave.popleft()
            if not acknowledged.done():  # else the sender was cancelled
                tell = partial(self._acknowledge, acknowledged)
                message = {"key": output.key, "value": output.value, "callback": tell}
                messages.setdefault(output.topic, []).append(message)
                self._in_flight += 1
        self._size = self._in_flight
        self._room.set()  # who closes waits for it, and nothing may arrive: all may be cancelled
        for topic, batch in messages.items():
            self._produce_batch(topic, batch)

    def _produce_batch(self, topic: str, batch: list[dict[str, Any]]) -> None:
        """At once, so that what has one partition has one request."""
        try:
            self._client.produce_batch(topic, batch)
        except KafkaException as error:
            batch = [message | {"_error": error.args[0]} for message in batch]
        for message in batch:
            if refused := message.get("_error"):
                message["callback"](refused, None)
                self._loop.call_soon(self._arrive)

    def _listen(self) -> None:
        """In the thread."""
        while not self._ended:
            if self._client.poll(LISTEN_S):
                self._loop.call_soon_threadsafe(self._arrive)

    def _acknowledge(
        self, acknowledged: Acknowledged, error: KafkaError | None, message: Message | None
    ) -> None:
        """In the thread, too: futures belong to the loop."""
        self._arrived.append((acknowledged, error, message))

    def _arrive(self) -> None:
        if not self._arrived:
            return
        while self._arrived:
            super()._acknowledge(*self._arrived.popleft())
        if not self._in_flight:
            self._board()

    async def close(self) -> None:
        while self._waiting_to_leave:
            self._room.clear()
            await self._room.wait()
        await super().close()
        self._ended = True
        await asyncio.to_thread(self._thread.join)  # it must not outlive the loop
        self._arrive()
