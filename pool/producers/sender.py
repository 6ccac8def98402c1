"""What every writer to the log has in common: its client's options, its records as bytes, and what
an acknowledgement means.

A record whose acknowledgement did not come in time is in doubt: it may be in the log. Sending it
again under the same id is safe, because readers fold equal ids.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from confluent_kafka import KafkaError, Message
from confluent_kafka import Producer as ConfluentProducer

from pool.client_errors import ClientErrors
from pool.connection import MAX_RECORD_BYTES, SILENCE_MS, Connection
from schemas import Codec, Position, Record
from servicekit.errors import Fatal, RecordTooLarge, SteplogError, TopicMismatch

Headers = Sequence[tuple[str, bytes]]
Acknowledged = asyncio.Future[Position]


class Output(NamedTuple):
    """A value for a topic, as a Kafka client takes it."""

    topic: str
    key: str | bytes | None
    value: bytes | None
    headers: Headers = ()


def producer_options(connection: Connection, linger_ms: int = 2, **options: Any) -> dict[str, Any]:
    """What every producer of ours has in common."""
    return connection.confluent(
        linger_ms=linger_ms,
        enable_idempotence=True,
        acks="all",
        compression_type="zstd",
        # librdkafka's own default spreads keys unlike every other client and would split groups.
        partitioner="murmur2_random",
        # The broker compares the compressed batch, we compare the record: ours is the stricter one.
        message_max_bytes=2 * MAX_RECORD_BYTES,
        # A topic that is missing is reported after this long; ours exist before anybody writes.
        topic_metadata_propagation_max_ms=5_000,
        batch_size=1024 * 1024,
        **options,
    )


class BaseProducer(ABC):
    """Of the event loop that made it; `async with` waits at its end for what is under way."""

    def __init__(
        self, connection: Connection, codec: Codec, timeout: float, linger_ms: int, **options: Any
    ) -> None:
        self._connection = connection
        self._codec = codec
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._client_errors = ClientErrors(connection)
        self._client = ConfluentProducer(
            producer_options(
                connection,
                linger_ms=linger_ms,
                error_cb=self._client_errors.record,
                message_timeout_ms=int(timeout * 1000),
                socket_timeout_ms=SILENCE_MS,
                **options,
            )
        )
        self._in_flight = 0
        self._room = asyncio.Event()
        """Set by every acknowledgement."""
        self._closed = False

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
        return await self._deliver(self.output(topic, key, record, headers))

    def output(self, topic: str, key: str, record: Record, headers: Headers = ()) -> Output:
        """What would be sent; nothing is."""
        name = self._connection.topic_name(topic)
        value = self._codec.encode(record, name)
        if len(value) > MAX_RECORD_BYTES:
            raise RecordTooLarge(
                f"the {type(record).__name__} for {name} takes {len(value):,} bytes, "
                f"{MAX_RECORD_BYTES:,} are the limit; "
                "send a long prompt as a delta of an earlier Step"
            )
        return Output(name, key, value, headers)

    @abstractmethod
    async def _deliver(self, output: Output) -> Position: ...

    def _acknowledge(
        self,
        acknowledged: Acknowledged,
        error: KafkaError | None,
        message: Message | None,
    ) -> None:
        """`message` is None only where there is an error."""
        self._in_flight -= 1
        self._room.set()
        if acknowledged.done():
            return  # the sender was cancelled
        if error is not None:
            acknowledged.set_exception(self._refusal(error))
            return
        assert message is not None
        place = Position(partition=message.partition() or 0, offset=message.offset() or 0)
        acknowledged.set_result(place)

    def _refusal(self, error: KafkaError) -> SteplogError:
        if error.fatal() or error.code() == KafkaError._FATAL:
            return Fatal(f"the producer cannot go on: {error.str()}")
        if error.code() in (KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART):
            return TopicMismatch(
                f"the topic does not exist at {self._connection.bootstrap}; "
                "make what is missing with `steplog topics create`"
            )
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            return RecordTooLarge(f"the broker refused the record as too large: {error.str()}")
        return self._client_errors.explain(
            f"no broker at {self._connection.bootstrap} acknowledged the record within "
            f"{self._timeout:g} s",
            error,
        )

    async def close(self) -> None:
        """Waits until everything sent is acknowledged or has failed."""
        self._closed = True
        try:
            async with asyncio.timeout(self._timeout):
                while self._in_flight:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            # librdkafka looks for overdue records once a second: end the rest, so that nobody waits.
            self._client.purge()
            self._client.flush(self._timeout)
