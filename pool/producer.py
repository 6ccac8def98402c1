"""Durable writes: when `await send(…)` returns, the broker has the record.

A confluent-kafka producer (idempotent, acks=all, zstd) is polled by one thread, which hands all
acknowledgements that have come to the event loop at once. A record whose acknowledgement did not
come in time is in doubt: it may be in the log. Sending it again under the same id is safe, because
readers fold equal ids.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from confluent_kafka import KafkaError, KafkaException, Message
from confluent_kafka import Producer as ConfluentProducer

from pool.connection import MAX_RECORD_BYTES, Connection
from pool.errors import BrokerUnavailable, Fatal, PoolError, RecordTooLarge
from schemas import Codec, Position, Record

Headers = Sequence[tuple[str, bytes]]


class Output(NamedTuple):
    """A value for a topic, as a Kafka client takes it."""

    topic: str
    key: str | bytes | None
    value: bytes | None
    headers: Headers = ()


def check_size(value: bytes, what: str) -> None:
    if len(value) > MAX_RECORD_BYTES:
        raise RecordTooLarge(
            f"{what} takes {len(value):,} bytes, {MAX_RECORD_BYTES:,} are the limit; "
            "send a long prompt as a delta of an earlier Step"
        )


def producer_options(connection: Connection, **options: Any) -> dict[str, Any]:
    """What every producer of ours has in common."""
    return connection.confluent(
        enable_idempotence=True,
        acks="all",
        compression_type="zstd",
        # librdkafka's own default spreads keys unlike every other client and would split groups.
        partitioner="murmur2_random",
        # The broker compares the compressed batch, we compare the record: ours is the stricter one.
        message_max_bytes=2 * MAX_RECORD_BYTES,
        linger_ms=2,
        batch_size=1024 * 1024,
        **options,
    )


class Producer:
    """Use it in the event loop that made it: `async with Producer(connection) as producer`."""

    def __init__(self, connection: Connection, codec: Codec, timeout: float = 30.0) -> None:
        self._connection = connection
        self._codec = codec
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._client = ConfluentProducer(
            producer_options(connection, message_timeout_ms=int(timeout * 1000))
        )
        self._acknowledged: deque[tuple[asyncio.Future[Position], KafkaError | None, Position]] = (
            deque()
        )
        self._waking = threading.Lock()
        self._room = asyncio.Event()
        self._turn = asyncio.Lock()
        self._closed = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="producer-poll", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def send(self, topic: str, key: str, record: Record, headers: Headers = ()) -> Position:
        """Appends the record to one of our topics; gives its place once the broker has it."""
        name = self._connection.topic_name(topic)
        value = self._codec.encode(record, name)
        check_size(value, f"the {type(record).__name__} for {name}")
        future = await self._enqueue(Output(name, key, value, headers))
        return await future

    async def _enqueue(self, output: Output) -> "asyncio.Future[Position]":
        future: asyncio.Future[Position] = self._loop.create_future()
        try:
            # One sender at a time waits for room, or later ones would overtake it.
            async with asyncio.timeout(self._timeout), self._turn:
                while not self._produce(output, future):
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            raise BrokerUnavailable(
                f"the send queue stayed full for {self._timeout:g} s; is a broker at "
                f"{self._connection.bootstrap}?"
            ) from None
        return future

    def _produce(self, output: Output, future: "asyncio.Future[Position]") -> bool:
        def delivered(error: KafkaError | None, message: Message) -> None:
            place = Position(partition=message.partition() or 0, offset=message.offset() or 0)
            self._acknowledged.append((future, error, place))

        if self._closed:
            raise Fatal("the producer is closed")
        try:
            self._client.produce(
                output.topic,
                output.value,
                output.key,
                headers=list(output.headers),
                on_delivery=delivered,
            )
        except BufferError:
            return False
        except KafkaException as error:
            raise self._refusal(error.args[0]) from error
        return True

    def _poll(self) -> None:
        while not self._stopping.is_set():
            self._client.poll(0.1)
            if self._acknowledged and self._waking.acquire(blocking=False):
                self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        self._waking.release()
        self._room.set()
        while self._acknowledged:
            future, error, place = self._acknowledged.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(place)
            else:
                future.set_exception(self._refusal(error))

    def _refusal(self, error: KafkaError) -> PoolError:
        if error.fatal():
            return Fatal(f"the producer cannot go on: {error.str()}")
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            return RecordTooLarge(f"the broker refused the record as too large: {error.str()}")
        return BrokerUnavailable(
            f"no broker at {self._connection.bootstrap} acknowledged the record within "
            f"{self._timeout:g} s: {error.str()}"
        )

    async def close(self) -> None:
        """Waits until everything sent is acknowledged or has failed."""
        self._closed = True
        try:
            await asyncio.to_thread(self._flush)
        finally:
            self._stopping.set()
        await asyncio.to_thread(self._thread.join)
        if self._acknowledged:
            self._waking.acquire(blocking=False)
            self._resolve()

    def _flush(self) -> None:
        if self._client.flush(self._timeout):
            # librdkafka looks for overdue records once a second: end the rest, so that nobody waits.
            self._client.purge()
            self._client.flush(self._timeout)
